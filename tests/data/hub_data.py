"""A Hub on loopback with one dataset, as much of it as `datasets` asks for."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

SHA = "5" * 40


@contextlib.contextmanager
def serve_dataset(repo: str, files: dict[str, bytes]) -> Iterator[str]:
    """Serves the files as the dataset `repo`; gives the address, for HF_ENDPOINT."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path).strip("/")
            if path.startswith(f"api/datasets/{repo}/tree/"):
                inside = re.sub(f"^api/datasets/{repo}/tree/[^/]+/?", "", path)
                rows = [self.row(n) for n in files if n.startswith(inside)]
                folders = {n.partition("/")[0] for n in files if "/" in n}
                if not inside:
                    rows += [{"type": "directory", "path": n, "oid": "0"} for n in folders]
                self.answer(json.dumps(rows).encode())
            elif path == f"api/datasets/{repo}" or path.startswith(f"api/datasets/{repo}/revision"):
                siblings = [{"rfilename": name} for name in files]
                about = {"id": repo, "sha": SHA, "siblings": siblings, "tags": [], "private": False}
                self.answer(json.dumps(about).encode())
            elif found := re.match(f"(?:api/)?datasets/{repo}/(?:resolve|raw)/[^/]+/(.+)", path):
                self.file(found[1])
            else:
                self.answer(b"", 404, {"X-Error-Code": "RepoNotFound"})

        do_HEAD = do_GET

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            wanted = re.findall(r"paths=([^&]+)", body.decode()) or []
            with contextlib.suppress(ValueError):
                wanted = json.loads(body)["paths"]
            rows = [self.row(unquote(n)) for n in wanted if unquote(n) in files]
            self.answer(json.dumps(rows).encode())

        def row(self, name: str) -> dict[str, object]:
            oid = hashlib.sha1(files[name]).hexdigest()
            return {"type": "file", "path": name, "size": len(files[name]), "oid": oid}

        def file(self, name: str) -> None:
            if name not in files:
                self.answer(b"", 404, {"X-Error-Code": "EntryNotFound"})
                return
            content = files[name]
            tag = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": SHA}
            wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if not wanted:
                self.answer(content, headers=tag)
                return
            start, end = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
            tag["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
            self.answer(content[start : end + 1], 206, tag)

        def answer(
            self, body: bytes, status: int = 200, headers: dict[str, str] | None = None
        ) -> None:
            self.send_response(status)
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
