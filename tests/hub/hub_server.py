"""A Hugging Face Hub on loopback: real HTTP, for the real client (huggingface_hub 1.33 to 2.4).

    python tests/hub/hub_server.py --root DIR

serves the repos of DIR until Ctrl-C and prints what to export. It speaks what pushing, fetching
and listing need: creating repos, uploads (regular and LFS), commits, branches, pull requests,
private and gated repos, downloads by Range, and a second origin for large files, which a token
must not be sent to. It does not speak Xet. Standard library only.
"""

from __future__ import annotations

import argparse
import base64
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from hub_faults import ON_UPLOAD, Fault, FaultyHandler
from hub_store import MAIN, HubStore, Refusal, is_large


@dataclass
class LoopbackHub:
    """A running Hub: what it has, what goes wrong, and what it was asked."""

    store: HubStore
    tokens: dict[str, str] = field(default_factory=lambda: {"hf_me": "me", "hf_other": "other"})
    """Who a token belongs to. A user writes to and sees the private repos of their own name."""
    may_read: set[str] = field(default_factory=lambda: {"me"})
    """Users whom gated repos are open to."""
    faults: list[Fault] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    """Every request so far, "METHOD /path?query"; those to the second origin begin with /lfs/."""
    ranges: list[str] = field(default_factory=list)
    """The Range header of each."""
    page_size: int = 50
    """Files on one page of a tree."""
    url: str = ""
    storage_url: str = ""
    """The second origin, of the large files."""
    closing: threading.Event = field(default_factory=threading.Event)

    @property
    def environment(self) -> dict[str, str]:
        """What makes a client talk to this Hub, as me."""
        return {"HF_ENDPOINT": self.url, "HF_TOKEN": "hf_me", "HF_HUB_DISABLE_XET": "1"}

    def add(
        self,
        repo: str,
        files: Mapping[str, bytes | Path],
        private: bool = False,
        gated: bool = False,
    ) -> str:
        """Commits files to a repo, which is made if need be; returns the commit."""
        if not self.store.exists(repo):
            self.store.create(repo, private, gated)
        return self.store.commit(repo, {n: self.store.keep(c) for n, c in files.items()})[0]

    def files(self, repo: str, revision: str = MAIN) -> dict[str, bytes]:
        """What a repo holds."""
        found = self.store.find(repo, revision)[1]["files"]
        return {name: self.store.blob(file["sha256"]).read_bytes() for name, file in found.items()}


@contextmanager
def loopback_hub(root: str | Path, port: int = 0) -> Iterator[LoopbackHub]:
    """Serves a folder of repos until the block ends; port 0 is any free one."""
    hub = LoopbackHub(HubStore(root))
    handler = type("BoundHandler", (Handler,), {"hub": hub})
    servers = [ThreadingHTTPServer(("127.0.0.1", number), handler) for number in (port, 0)]
    hub.url, hub.storage_url = (  # by two names: huggingface_hub 1 tells origins by the host alone
        f"http://{host}:{server.server_port}"
        for host, server in zip(("127.0.0.1", "localhost"), servers, strict=True)
    )
    for server in servers:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield hub
    finally:
        hub.closing.set()
        for server in servers:
            server.shutdown()
            server.server_close()


PAGES = ("whoami-v2", "validate-yaml", "repos/create", "agent-harnesses")
PAGES_OF_A_REPO = (
    *("revision", "tree", "paths-info", "refs", "commits"),
    *("branch", "preupload", "commit"),
)


class Handler(FaultyHandler):
    """What each page answers: a method `on_...` answers a request or raises Refusal."""

    hub: LoopbackHub

    def route(self) -> None:
        """Finds who answers. Names of repos have two parts, owner and name."""
        parts = self.parts
        if self.headers.get("Host") == self.hub.storage_url.partition("//")[2]:
            return self.on_storage(parts[1])
        if parts[0] != "api":
            repo = "/".join(parts[:2])
            if parts[2:3] == ["resolve"]:
                return self.on_resolve(repo, parts[3], "/".join(parts[4:]))
            if parts[2:4] == ["info", "lfs"]:
                return self.on_lfs(repo.removesuffix(".git"), parts[4:])
            return self.answer(200, b"A Hub on loopback.\n")
        if parts[1] == "models" and len(parts) >= 4:
            repo, what = "/".join(parts[2:4]), parts[4] if len(parts) > 4 else "revision"
            if what in PAGES_OF_A_REPO:
                on = getattr(self, f"on_{what.replace('-', '_')}")
                return on(repo, parts[5] if len(parts) > 5 else MAIN)
        if (name := "/".join(parts[1:])) in PAGES:
            return getattr(self, "on_" + name.replace("-", "_").replace("/", "_"))()
        raise Refusal(404, f"no such page: {self.path}")

    # Who may do what ----------------------------------------------------------------------------

    def user(self) -> str | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.hub.tokens:
            raise Refusal(401, "Invalid credentials in Authorization header")
        return self.hub.tokens.get(token)

    def may_see(self, repo: str, content: bool = False) -> dict[str, Any]:
        """A repo's state, if the user may see it (and read its files)."""
        user, owner = self.user(), repo.partition("/")[0]
        state = self.hub.store.read(repo) if self.hub.store.exists(repo) else None
        if state is None or (state["private"] and user != owner):
            if user is None:  # so that nobody can find out names of private repos
                raise Refusal(401, "Invalid username or password.", "RepoNotFound")
            raise Refusal(404, "Repository not found", "RepoNotFound")
        if content and state["gated"] and user not in {owner, *self.hub.may_read}:
            status = 401 if user is None else 403
            raise Refusal(status, f"Access to model {repo} is restricted.", "GatedRepo")
        return state

    def may_write(self, repo: str) -> None:
        user = self.user()
        if user is None:
            raise Refusal(401, "Invalid username or password.")
        if user != repo.partition("/")[0]:
            raise Refusal(403, f"You don't have the rights to write to {repo}.")

    # Pages about people and repos ---------------------------------------------------------------

    def on_whoami_v2(self) -> None:
        user = self.user()
        if user is None:
            raise Refusal(401, "Invalid username or password.")
        access = {"displayName": "loopback", "role": "write"}
        auth = {"type": "access_token", "accessToken": access}
        self.answer_json({"type": "user", "name": user, "orgs": [], "auth": auth})

    def on_validate_yaml(self) -> None:
        lines = self.read_json()["content"].splitlines()
        if lines[:1] == ["---"] and "---" not in lines[1:]:
            errors = [{"message": "the front matter has no end"}]
            return self.answer_json({"errors": errors, "warnings": []}, 400)
        self.answer_json({"errors": [], "warnings": []})

    def on_agent_harnesses(self) -> None:
        """What tells huggingface_hub 2 who runs it. It asks once a day, if it gets an answer."""
        self.answer_json({"standardEnvVars": [], "harnesses": {}})

    def on_repos_create(self) -> None:
        wanted = self.read_json()
        repo = f"{wanted.get('organization') or self.user()}/{wanted['name']}"
        self.may_write(repo)
        url = f"{self.hub.url}/{repo}"
        with self.hub.store.lock:
            if self.hub.store.exists(repo):
                raise Refusal(409, "You already created this model repo", url=url)
            private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
            self.hub.store.create(repo, private)
        self.answer_json({"url": url, "name": repo, "id": repo})

    def on_revision(self, repo: str, revision: str) -> None:
        state = self.may_see(repo)
        commit, content = self.hub.store.find(repo, revision)
        siblings = [{"rfilename": path} for path in sorted(content["files"])]
        if "blobs" in self.query:
            files = content["files"]
            siblings = [{"rfilename": path, **described(files[path])} for path in sorted(files)]
            for sibling in siblings:
                sibling["blobId"] = sibling.pop("oid")
                if "lfs" in sibling:
                    sibling["lfs"]["sha256"] = sibling["lfs"].pop("oid")
        about = {"id": repo, "modelId": repo, "author": repo.partition("/")[0], "sha": commit}
        about |= {"private": state["private"], "gated": "auto" if state["gated"] else False}
        about |= {"lastModified": content["date"], "createdAt": content["date"]}
        self.answer_json({**about, "tags": [], "downloads": 0, "likes": 0, "siblings": siblings})

    def on_tree(self, repo: str, revision: str) -> None:
        """The files of a folder, a page at a time; the Link header has the address of the next."""
        self.may_see(repo)
        commit, content = self.hub.store.find(repo, revision)
        prefix = "".join(f"{part}/" for part in self.parts[6:])
        recursive = self.query.get("recursive", ["false"])[0].lower() in ("true", "1")
        rows: dict[str, dict[str, Any]] = {}
        for path, file in sorted(content["files"].items()):
            if not path.startswith(prefix):
                continue
            *folders, _ = path.removeprefix(prefix).split("/")
            for depth in range(1, len(folders) + 1 if recursive else min(len(folders), 1) + 1):
                folder = prefix + "/".join(folders[:depth])
                rows[folder] = {"type": "directory", "path": folder, "oid": commit}
            if recursive or not folders:
                rows[path] = {"type": "file", "path": path, **described(file)}
        if prefix and not rows:
            raise Refusal(404, f"{prefix} does not exist", "EntryNotFound")
        begin = int(self.query.get("cursor", ["0"])[0])
        end, headers = begin + self.hub.page_size, {}
        if end < len(rows):
            page = f"{self.hub.url}{urlsplit(self.path).path}?recursive={recursive}&cursor={end}"
            headers["Link"] = f'<{page}>; rel="next"'
        self.answer_json(list(rows.values())[begin:end], headers=headers)

    def on_paths_info(self, repo: str, revision: str) -> None:
        self.may_see(repo)
        files = self.hub.store.find(repo, revision)[1]["files"]
        wanted = parse_qs(self.read_body().decode()).get("paths", [])
        rows = ({"type": "file", "path": p, **described(files[p])} for p in wanted if p in files)
        self.answer_json(list(rows))

    def on_refs(self, repo: str, _: str) -> None:
        refs = self.may_see(repo)["refs"].items()
        rows = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": commit} for n, commit in refs]
        branches = [row for row in rows if not row["name"].startswith("refs/")]
        requests = [{**row, "ref": row["name"]} for row in rows if row not in branches]
        lists = {"branches": branches, "tags": [], "converts": [], "pullRequests": requests}
        self.answer_json(lists)

    def on_commits(self, repo: str, revision: str) -> None:
        self.may_see(repo)
        history = self.hub.store.history(repo, revision)
        about = {"message": "", "authors": [{"user": repo.partition("/")[0]}]}
        self.answer_json(
            [{"id": c, "title": x["title"], "date": x["date"], **about} for c, x in history]
        )

    def on_branch(self, repo: str, name: str) -> None:
        self.may_write(repo)
        self.may_see(repo)
        self.hub.store.branch(repo, name, self.read_json().get("startingPoint", MAIN))
        self.answer_json({})

    # Downloads ----------------------------------------------------------------------------------

    def on_resolve(self, repo: str, revision: str, path: str) -> None:
        """A small file itself; of a large one, where it is and what its sha256 is."""
        self.may_see(repo, content=True)
        commit, content = self.hub.store.find(repo, revision)
        headers = {"X-Repo-Commit": commit}
        file = content["files"].get(path)
        if file is None:
            headers |= {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}
            return self.answer(404, b"Entry not found", headers)
        headers |= {"ETag": f'"{file["oid"]}"', "Accept-Ranges": "bytes"}
        if not file["large"]:
            return self.answer(200, self.hub.store.blob(file["sha256"]), headers)
        headers |= {"X-Linked-Etag": f'"{file["sha256"]}"', "X-Linked-Size": str(file["size"])}
        headers["Location"] = f"{self.hub.storage_url}/lfs/{file['sha256']}/{quote(path)}"
        self.answer(302, b"Found", headers)

    def on_storage(self, sha256: str) -> None:
        """The second origin: contents of large files, to be got and put without a token."""
        if "Authorization" in self.headers:
            raise Refusal(400, "a token was sent to where it does not belong")
        blob = self.hub.store.blob(sha256)
        if self.command == "PUT":
            return self.on_put(sha256)
        if not blob.is_file():
            raise Refusal(404, "no such object")
        self.answer(200, blob, {"ETag": f'"{sha256[:32]}"', "Accept-Ranges": "bytes"})

    # Uploads ------------------------------------------------------------------------------------

    def on_put(self, sha256: str) -> None:
        read, fault = self.rfile.read, self.fault(ON_UPLOAD, self.body_length)
        if fault is not None and fault.kind == "slow":
            read = partial(self.read_slowly, seconds=fault.seconds)
        elif fault is not None:
            read(fault.at)
            self.interrupt(fault)
        length, self.body_length = self.body_length, 0
        self.hub.store.keep_stream(read, length, sha256)
        self.answer(200)

    def on_preupload(self, repo: str, revision: str) -> None:
        """Which files are large, and which the repo has already."""
        self.may_write(repo)
        self.may_see(repo)
        has, rows = self.hub.store.find(repo, revision)[1]["files"], []
        for file in self.read_json()["files"]:
            large = is_large(base64.b64decode(file["sample"]), file["size"])
            row = {"path": file["path"], "uploadMode": "lfs" if large else "regular"}
            old = has.get(file["path"])
            row["oid"] = None if old is None else old["sha256" if old["large"] else "oid"]
            rows.append({**row, "shouldIgnore": False})
        self.answer_json({"files": rows})

    def on_lfs(self, repo: str, parts: list[str]) -> None:
        """Git LFS: where large files are to be put, and whether they arrived."""
        self.may_write(repo)
        asked, store = self.read_json(), self.hub.store
        if parts == ["verify"]:
            blob = store.blob(asked["oid"])
            if not blob.is_file() or blob.stat().st_size != asked["size"]:
                raise Refusal(404, "the object is not there")
            return self.answer_json({})
        objects = [{"oid": o["oid"], "size": o["size"]} for o in asked["objects"]]
        for wanted in objects:
            if not store.blob(wanted["oid"]).is_file():
                verify = {"href": f"{self.hub.url}/{repo}.git/info/lfs/verify"}
                upload = {"href": f"{self.hub.storage_url}/lfs/{wanted['oid']}"}
                wanted["actions"] = {"upload": upload, "verify": verify}
        self.answer_json({"transfer": "basic", "objects": objects})

    def on_commit(self, repo: str, revision: str) -> None:
        """All of a commit's lines, or none of them."""
        self.may_write(repo)
        self.may_see(repo)
        store, header, files = self.hub.store, {}, {}
        for line in self.read_body().splitlines():
            row = json.loads(line)
            value = row["value"]
            if row["key"] == "header":
                header = value
            elif row["key"] == "file":
                files[value["path"]] = store.keep(base64.b64decode(value["content"]))
            elif row["key"] == "lfsFile":
                if not store.blob(value["oid"]).is_file():
                    raise Refusal(400, f"the content of {value['path']} was not uploaded")
                files[value["path"]] = store.describe(value["oid"])
            elif row["key"] in ("deletedFile", "deletedFolder"):
                path = value["path"].rstrip("/")
                files[path + "/" * (row["key"] == "deletedFolder")] = None
        pr = "create_pr" in self.query
        parent = header.get("parentCommit")
        commit, on = store.commit(repo, files, header["summary"], revision, parent, pr)
        page = f"{self.hub.url}/{repo}"
        answer = {"success": True, "commitOid": commit, "commitUrl": f"{page}/commit/{commit}"}
        if pr:
            answer["pullRequestUrl"] = f"{page}/discussions/{on.rpartition('/')[2]}"
        self.answer_json(answer)


def described(file: Mapping[str, Any]) -> dict[str, Any]:
    """A file of a commit in the Hub's words."""
    row = {"oid": file["oid"], "size": file["size"]}
    if file["large"]:
        row["lfs"] = {"oid": file["sha256"], "size": file["size"], "pointerSize": 134}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description="A Hugging Face Hub on loopback.")
    parser.add_argument("--root", required=True, help="the folder that keeps what is pushed")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    options = parser.parse_args()
    try:
        serve(options.root, options.port)
    except OSError as error:
        parser.error(f"{options.root}, port {options.port}: {error.strerror}")


def serve(root: str, port: int) -> None:
    """Until Ctrl-C."""
    with loopback_hub(root, port) as hub:
        pairs = " ".join(f"{key}={value}" for key, value in hub.environment.items())
        print(f"export {pairs}", flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    main()
