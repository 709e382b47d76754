"""A Hub on loopback for the tests of fetching: enough of the protocol for the real client."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "a" * 40


@dataclass
class Hub:
    """What the server has, what it answers, and what it was asked."""

    files: dict[str, bytes]
    """By name, of the one repo "me/model"."""
    flip: int = 0
    """So many downloads of weights arrive with a byte changed."""
    status: int = 200
    code: str = ""
    """What every request is answered with, and the Hub's X-Error-Code."""
    asked: list[str] = field(default_factory=list)
    url: str = ""


@contextmanager
def loopback_hub(files: dict[str, bytes]) -> Iterator[Hub]:
    """Serves until the block ends."""
    hub = Hub(files)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, with_body: bool) -> None:
            hub.asked.append(f"{self.command} {self.path}")
            if hub.status != 200:
                return self.send(hub.status, b"", {"X-Error-Code": hub.code}, with_body)
            if self.path.count("/") < 5:
                return self.send(200, b"the front page", {}, with_body)
            owner, repo, _, revision, name = self.path.lstrip("/").split("/", 4)
            if f"{owner}/{repo}" != "me/model":
                return self.send(404, b"", {"X-Error-Code": "RepoNotFound"}, with_body)
            if revision not in ("main", COMMIT):
                return self.send(404, b"", {"X-Error-Code": "RevisionNotFound"}, with_body)
            if name not in hub.files:
                headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}
                return self.send(404, b"", headers, with_body)
            body = hub.files[name]
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(body).hexdigest()}"'}
            if name.endswith(".safetensors"):
                headers["X-Linked-Etag"] = f'"{hashlib.sha256(body).hexdigest()}"'
                headers["X-Linked-Size"] = str(len(body))
                if with_body and hub.flip:
                    hub.flip -= 1
                    middle = len(body) // 2
                    body = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
            return self.send(200, body, headers, with_body)

        def send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
