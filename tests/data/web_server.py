"""A web server on loopback for files in memory, with faults."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Fault:
    """What happens to the next `times` answers for a path that ends with `path`: they end after
    `at` bytes, stall there, come drop by drop, have another status, lead elsewhere (`to`), or are
    other content. Ranges are known, or not."""

    path: str
    kind: str  # "end", "stall", "drip", "status", "moved", "html", "noranges"
    at: int = 0
    status: int = 500
    times: int = 1
    seconds: float = 2.0
    to: str = ""


@dataclass
class Web:
    """The server: its files by path, the faults to come, and the requests so far."""

    url: str
    files: dict[str, bytes]
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    """(path, its Range)"""

    def fault(self, path: str) -> Fault | None:
        for fault in self.faults:
            if path.endswith(fault.path) and fault.times > 0:
                fault.times -= 1
                return fault
        return None


@contextlib.contextmanager
def serve(files: dict[str, bytes]) -> Iterator[Web]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            web.requests.append((self.path, self.headers.get("Range")))
            content, fault = files.get(self.path.lstrip("/")), web.fault(self.path)
            kind = fault.kind if fault else ""
            if fault is not None and kind == "status":
                self.send_error(fault.status)
                return
            if fault is not None and kind == "moved":
                self.send_response(302)
                self.send_header("Location", fault.to)
                self.end_headers()
                return
            if kind == "html":
                content = b"<html>please log in</html>"
            if content is None:
                self.send_error(404)
                return
            start, body = 0, content
            wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            if wanted and kind != "noranges":
                start = int(wanted[1])
                body = content[start:]
                self.send_response(206)
                self.send_header(
                    "Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}"
                )
            else:
                self.send_response(200)
            self.send_header("Content-Type", "text/html" if kind == "html" else "application/x-tar")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{hash(content)}"')
            self.end_headers()
            if fault is not None and kind in ("end", "stall"):
                body = body[: max(0, fault.at - start)]
            with contextlib.suppress(OSError):
                while kind == "drip" and body:
                    self.wfile.write(body[:1])
                    body = body[1:]
                    time.sleep(0.05)
                self.wfile.write(body)
                if fault is not None and kind == "stall":
                    self.wfile.flush()
                    time.sleep(fault.seconds)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    web = Web(f"http://127.0.0.1:{server.server_port}", files)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield web
    finally:
        server.shutdown()
        server.server_close()
