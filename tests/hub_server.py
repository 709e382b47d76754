"""A Hugging Face Hub on loopback, in memory: real HTTP for the real client, with injected faults.

It implements what `vit`, timm and transformers need: repos, uploads (regular and LFS), commits,
branches, pull requests, private and gated repos, range requests, and a second origin for large
files, to which a token must not be sent.
"""

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

from loopback import CHUNK_SIZE, ON_UPLOAD, ErrorResponse, Handler, Server

MAIN = "main"
NOW = "2026-01-01T00:00:00.000Z"


@dataclass(frozen=True)
class HubFile:
    """A file in a commit."""

    data: bytes

    @cached_property
    def is_lfs(self) -> bool:
        """Whether the Hub stores it with LFS: binary files and large ones."""
        return b"\0" in self.data[:512] or len(self.data) > 10_000_000

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @cached_property
    def oid(self) -> str:
        """The git blob ID of the file or of its LFS pointer."""
        pointer = f"version lfs\noid sha256:{self.sha256}\nsize {len(self.data)}\n".encode()
        content = pointer if self.is_lfs else self.data
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    def to_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {"blobId": self.oid, "oid": self.oid, "size": len(self.data)}
        if self.is_lfs:
            size = len(self.data)
            row["lfs"] = {"sha256": self.sha256, "oid": self.sha256, "size": size}
            row["lfs"]["pointerSize"] = 134
        return row


@dataclass
class Commit:
    """A snapshot of a repo's files."""

    files: dict[str, HubFile]
    title: str
    parent: str | None = None

    @property
    def id(self) -> str:
        files = sorted((name, file.oid) for name, file in self.files.items())
        return hashlib.sha1(repr((self.parent, self.title, files)).encode()).hexdigest()


@dataclass
class Repo:
    """The branches of a repo, and all its commits."""

    private: bool = False
    gated: bool = False
    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)

    def add(self, branch: str, commit: Commit) -> str:
        self.commits[commit.id] = commit
        self.refs[branch] = commit.id
        return commit.id

    def resolve(self, revision: str) -> str:
        """Resolve a branch or a (possibly abbreviated) commit ID to a commit ID."""
        ids = (i for i in self.commits if len(revision) >= 7 and i.startswith(revision))
        if not (commit := self.refs.get(revision) or next(ids, None)):
            raise ErrorResponse(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit


class LoopbackHub(Server):
    """A running Hub: its repos, faults and recorded requests. Requests to its second origin have
    paths under /lfs/."""

    def __init__(self) -> None:
        super().__init__(HubHandler)
        self.storage_url = f"http://localhost:{self.server_port}"
        """The second origin, for large files."""
        self.repos: dict[str, Repo] = {}
        """By name; names of datasets start with "datasets/"."""
        self.uploads: dict[str, bytes] = {}
        """Large files by SHA-256."""
        self.tokens = {"hf_me": "me", "hf_other": "other"}
        """Users by token. A user can write to, and see private repos in, their own namespace."""
        self.readers = {"me"}
        """Users with access to gated repos."""
        self.lock = threading.RLock()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that point a client to this Hub, logged in as "me"."""
        return {"HF_ENDPOINT": self.url, "HF_TOKEN": "hf_me"}

    def create(self, repo: str, private: bool = False, gated: bool = False) -> Repo:
        self.repos[repo] = created = Repo(private, gated)
        created.add(MAIN, Commit({}, "initial commit"))
        return created

    def add(
        self,
        repo: str,
        files: Mapping[str, bytes | Path],
        private: bool = False,
        gated: bool = False,
    ) -> str:
        """Commit files to a repo, creating it if needed; return the commit ID."""
        target = self.repos.get(repo) or self.create(repo, private, gated)
        contents = {n: c.read_bytes() if isinstance(c, Path) else c for n, c in files.items()}
        return self.commit(target, {name: HubFile(data) for name, data in contents.items()})

    def commit(
        self,
        repo: Repo,
        files: Mapping[str, HubFile | None],
        title: str = "upload",
        branch: str = MAIN,
        parent: str | None = None,
    ) -> str:
        """Commit files, where None removes one; return the commit ID."""
        parent = parent or repo.refs[branch]
        merged = {**repo.commits[parent].files, **files}
        existing = {name: file for name, file in merged.items() if file is not None}
        self.uploads |= {file.sha256: file.data for file in existing.values() if file.is_lfs}
        return repo.add(branch, Commit(existing, title, parent))

    def head(self, repo: str, revision: str = MAIN) -> str:
        return self.repos[repo].resolve(revision)

    def files(self, repo: str, revision: str = MAIN) -> dict[str, bytes]:
        """The files of a repo by name."""
        commit = self.repos[repo].commits[self.head(repo, revision)]
        return {name: file.data for name, file in commit.files.items()}


class HubHandler(Handler):
    """The Hub's endpoints: a method `on_...` responds to a request or raises ErrorResponse."""

    server: LoopbackHub

    def record(self) -> None:
        if "agent-harnesses" not in self.path:  # requested once a day by huggingface_hub 2
            super().record()

    def read_json(self) -> Any:
        return json.loads(self.read_body() or b"{}")

    def route(self) -> None:
        with self.server.lock if self.command == "POST" else contextlib.nullcontext():
            self.dispatch()

    def dispatch(self) -> None:
        """Dispatch to a handler. Names of repos have two parts, owner and name."""
        parts, kind = self.parts, ""
        if self.headers.get("Host") == self.server.storage_url.partition("//")[2]:
            return self.on_storage(parts[1])
        if parts[0] == "datasets":
            parts, kind = parts[1:], "datasets/"
        repo = kind + "/".join(parts[:2])
        if parts[2:3] == ["resolve"]:
            return self.on_resolve(repo, parts[3], "/".join(parts[4:]))
        if parts[2:4] == ["info", "lfs"]:
            return self.on_lfs(repo.removesuffix(".git"))
        if parts[:2] in (["api", "models"], ["api", "datasets"]) and len(parts) >= 4:
            repo = "/".join(parts[2:4] if parts[1] == "models" else parts[1:4])
            endpoint = parts[4].replace("-", "_") if len(parts) > 4 else "revision"
            if (handler := getattr(self, f"on_{endpoint}", None)) is not None:
                return handler(repo, parts[5] if len(parts) > 5 else MAIN)
        if self.path in ("/api/whoami-v2", "/api/validate-yaml", "/api/repos/create"):
            return getattr(self, "on_" + parts[-1].replace("-", "_"))()
        raise ErrorResponse(404, f"no such endpoint: {self.path}")

    # Permissions --------------------------------------------------------------------------------

    def user(self) -> str | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.server.tokens:
            raise ErrorResponse(401, "Invalid credentials in Authorization header")
        return self.server.tokens.get(token)

    def find_repo(self, name: str, content: bool = False) -> Repo:
        """Return a repo if the user may see it (and, with `content`, read its files)."""
        user, owner, repo = self.user(), name.partition("/")[0], self.server.repos.get(name)
        if repo is None or (repo.private and user != owner):
            # The same for missing and private repos, so as not to reveal names of private ones.
            status = 401 if user is None else 404
            raise ErrorResponse(status, "Repository not found", "RepoNotFound")
        if content and repo.gated and user not in {owner, *self.server.readers}:
            status = 401 if user is None else 403
            raise ErrorResponse(status, f"Access to model {name} is restricted.", "GatedRepo")
        return repo

    def check_writer(self, name: str) -> None:
        if (user := self.user()) is None:
            raise ErrorResponse(401, "Invalid username or password.")
        if user != name.partition("/")[0]:
            raise ErrorResponse(403, f"You don't have the rights to write to {name}.")

    # Users and repos ----------------------------------------------------------------------------

    def on_whoami_v2(self) -> None:
        if (user := self.user()) is None:
            raise ErrorResponse(401, "Invalid username or password.")
        auth = {"type": "access_token", "accessToken": {"displayName": "x", "role": "write"}}
        self.respond_json({"type": "user", "name": user, "orgs": [], "auth": auth})

    def on_validate_yaml(self) -> None:
        is_valid = "license: invalid" not in self.read_json()["content"]
        errors = [] if is_valid else [{"message": '"license" must be one of apache-2.0, mit'}]
        self.respond_json({"errors": errors, "warnings": []}, 200 if is_valid else 400)

    def on_create(self) -> None:
        request = self.read_json()
        name = f"{request.get('organization') or self.user()}/{request['name']}"
        self.check_writer(name)
        url = f"{self.server.url}/{name}"
        if name in self.server.repos:
            raise ErrorResponse(409, "You already created this model repo", url=url)
        private = request.get("visibility") == "private" or bool(request.get("private"))
        self.server.create(name, private)
        self.respond_json({"url": url, "name": name, "id": name})

    def on_revision(self, name: str, revision: str) -> None:
        repo = self.find_repo(name)
        commit, name = repo.resolve(revision), name.removeprefix("datasets/")
        files = sorted(repo.commits[commit].files.items())
        blobs = "blobs" in self.query
        siblings = [{"rfilename": n, **(f.to_json() if blobs else {})} for n, f in files]
        info = {"id": name, "modelId": name, "author": name.partition("/")[0], "sha": commit}
        info |= {"private": repo.private, "gated": "auto" if repo.gated else False}
        info |= {"lastModified": NOW, "createdAt": NOW, "tags": [], "downloads": 0, "likes": 0}
        self.respond_json({**info, "siblings": siblings})

    def on_tree(self, name: str, revision: str) -> None:
        """List files at all depths; also subdirectories, unless the listing is recursive."""
        prefix = "".join(f"{part}/" for part in self.parts[6:])
        rows = [row for row in self.rows(name, revision) if row["path"].startswith(prefix)]
        if prefix and not rows:
            raise ErrorResponse(404, "no such directory", "EntryNotFound")
        names = {row["path"].removeprefix(prefix).partition("/") for row in rows}
        if self.query.get("recursive") != ["True"]:
            directories = sorted({prefix + first for first, slash, _ in names if slash})
            rows += [{"type": "directory", "path": path, "oid": "0"} for path in directories]
        self.respond_json(rows)

    def rows(self, name: str, revision: str) -> list[dict[str, Any]]:
        repo = self.find_repo(name)
        files = sorted(repo.commits[repo.resolve(revision)].files.items())
        return [{"type": "file", "path": n, **f.to_json()} for n, f in files]

    def on_branch(self, name: str, branch: str) -> None:
        self.check_writer(name)
        repo = self.find_repo(name)
        if branch in repo.refs:
            raise ErrorResponse(409, f"Reference already exists: {branch}")
        repo.refs[branch] = repo.resolve(self.read_json().get("startingPoint", MAIN))
        self.respond_json({})

    # Downloads ----------------------------------------------------------------------------------

    def on_resolve(self, name: str, revision: str, path: str) -> None:
        """Send a small file; redirect to a large one, with its SHA-256."""
        repo = self.find_repo(name, content=True)
        commit = repo.resolve(revision)
        headers = {"X-Repo-Commit": commit}
        file = repo.commits[commit].files.get(path)
        if file is None:
            headers |= {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}
            return self.respond(404, b"Entry not found", headers)
        headers |= {"ETag": f'"{file.oid}"', "Accept-Ranges": "bytes"}
        if not file.is_lfs:
            return self.respond(200, file.data, headers)
        headers |= {"X-Linked-Etag": f'"{file.sha256}"', "X-Linked-Size": str(len(file.data))}
        headers["Location"] = f"{self.server.storage_url}/lfs/{file.sha256}/{quote(path)}"
        self.respond(302, b"Found", headers)

    def on_storage(self, sha256: str) -> None:
        """The second origin: downloads and uploads of large files, without a token."""
        if "Authorization" in self.headers:
            raise ErrorResponse(400, "a token was sent to the storage server")
        if self.command == "PUT":
            return self.on_put(sha256)
        if sha256 not in self.server.uploads:
            raise ErrorResponse(404, "no such object")
        headers = {"ETag": f'"{sha256[:32]}"', "Accept-Ranges": "bytes"}
        self.respond(200, self.server.uploads[sha256], headers)

    # Uploads ------------------------------------------------------------------------------------

    def on_put(self, sha256: str) -> None:
        data, fault = bytearray(), self.fault(ON_UPLOAD, self.unread)
        if fault is not None and fault.kind == "hangup":
            self.rfile.read(fault.at)
            self.interrupt(fault)
        while self.unread and (chunk := self.rfile.read(min(self.unread, CHUNK_SIZE))):
            self.server.closing.wait(fault.seconds if fault is not None else 0)
            data += chunk  # in place: a copy of all for each chunk takes a minute for 20 MB
            self.unread -= len(chunk)
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ErrorResponse(400, "the content does not match its SHA-256")
        self.server.uploads[sha256] = bytes(data)
        self.respond(200)

    def on_preupload(self, name: str, revision: str) -> None:
        """Report which files are large, and which the repo already has."""
        self.check_writer(name)
        repo, rows = self.find_repo(name), []
        existing = repo.commits[repo.resolve(revision)].files
        for file in self.read_json()["files"]:
            large = b"\0" in base64.b64decode(file["sample"]) or file["size"] > 10_000_000
            row = {"path": file["path"], "uploadMode": "lfs" if large else "regular"}
            old = existing.get(file["path"])
            row["oid"] = None if old is None else old.sha256 if old.is_lfs else old.oid
            rows.append({**row, "shouldIgnore": False})
        self.respond_json({"files": rows})

    def on_lfs(self, name: str) -> None:
        """Git LFS: return the upload URLs of large files."""
        self.check_writer(name)
        objects = [{"oid": o["oid"], "size": o["size"]} for o in self.read_json()["objects"]]
        for item in objects:
            if item["oid"] not in self.server.uploads:
                upload = {"href": f"{self.server.storage_url}/lfs/{item['oid']}"}
                item["actions"] = {"upload": upload}
        self.respond_json({"transfer": "basic", "objects": objects})

    def on_commit(self, name: str, revision: str) -> None:
        """Apply all operations of a commit, or none."""
        self.check_writer(name)
        repo, header, files = self.find_repo(name), {}, {}
        for line in self.read_body().splitlines():
            row = json.loads(line)
            value = row["value"]
            if row["key"] == "header":
                header = value
            elif row["key"] == "file":
                files[value["path"]] = HubFile(base64.b64decode(value["content"]))
            elif row["key"] == "lfsFile":
                if value["oid"] not in self.server.uploads:
                    raise ErrorResponse(400, f"the content of {value['path']} was not uploaded")
                files[value["path"]] = HubFile(self.server.uploads[value["oid"]])
            else:
                files[value["path"]] = None
        head, create_pr = repo.resolve(revision), "create_pr" in self.query
        if header.get("parentCommit") not in (None, head) and not create_pr:
            raise ErrorResponse(412, "A commit has happened since. Please refresh and try again.")
        number = 1 + sum(ref.startswith("refs/pr/") for ref in repo.refs)
        branch = f"refs/pr/{number}" if create_pr else revision
        commit = self.server.commit(repo, files, header["summary"], branch, head)
        page = f"{self.server.url}/{name}"
        response = {"success": True, "commitOid": commit, "commitUrl": f"{page}/commit/{commit}"}
        if create_pr:
            response["pullRequestUrl"] = f"{page}/discussions/{number}"
        self.respond_json(response)
