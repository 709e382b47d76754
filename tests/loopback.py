"""An HTTP server on loopback: real HTTP from memory, with injected faults."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, Self
from urllib.parse import parse_qs, unquote, urlsplit

CHUNK_SIZE = 16 << 10

Kind = Literal[
    *("status", "body", "whole", "truncate", "reset", "stall", "slow", "flip", "length", "hangup")
]
ON_REQUEST, ON_UPLOAD = ("status", "body", "whole"), ("hangup", "slow")
ON_RESPONSE = ("truncate", "reset", "stall", "slow", "flip", "length")


@dataclass
class Fault:
    """A fault of `times` requests whose "METHOD /path" contains `where`, from the nth on.

    status      respond with `status`, handling nothing
    body        respond with `body`, ignoring the Range header
    whole       respond with the whole file, ignoring the Range header
    truncate    end the response after `at` bytes
    reset       reset the connection after `at` bytes of the response; 0: before its headers
    stall       send nothing for `seconds` after `at` bytes; 0: before the headers
    slow        delay each 16 KiB by `seconds`, in uploads and downloads
    flip        flip a bit of byte `at`
    length      shorten the response to `at` bytes, with a matching Content-Length
    hangup      reset the connection after `at` bytes of an upload

    Responses without a byte `at` are not counted.
    """

    kind: Kind
    where: str = ""
    at: int = 0
    nth: int = 1
    times: int = 1
    """Number of consecutive requests affected, from the nth on."""
    seconds: float = 600.0
    status: int = 500
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    handled: bool = False
    """Whether the request is handled nonetheless before `status` is sent."""
    matches: int = 0
    """Number of matching requests so far."""
    hits: int = 0
    """Number of requests that the fault was applied to."""

    def applies_to(self, request: str, length: int) -> bool:
        """Whether the fault applies to this request, which transfers `length` bytes."""
        needs_body = self.at > 0 or self.kind in ("truncate", "slow", "flip", "length", "hangup")
        if self.where not in request or (needs_body and self.at >= length):
            return False
        self.matches += 1
        applies = self.nth <= self.matches < self.nth + self.times
        self.hits += applies
        return applies


class ErrorResponse(Exception):
    """An error response: an HTTP status, a message and the Hub's X-Error-Code."""

    def __init__(self, status: int, message: str, code: str = "", **fields: Any) -> None:
        super().__init__(message)
        self.status, self.code, self.fields, self.headers = status, code, fields, {}


class Server(ThreadingHTTPServer):
    """A server on any free port that runs within a `with` block."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, handler: type[Handler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.faults: list[Fault] = []
        """Faults to inject."""
        self.requests: list[str] = []
        """All requests so far, as "METHOD /path?query"."""
        self.ranges: list[str] = []
        """The Range header of each request."""
        self.closing = threading.Event()
        """Set on exit, to end stalls and delays."""

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    """Handles requests: `route` calls `respond` or raises ErrorResponse."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms for the ACK of its headers
    server: Server

    def route(self) -> None:
        raise NotImplementedError

    def record(self) -> None:
        self.server.requests.append(self.name)
        self.server.ranges.append(self.headers.get("Range", ""))

    def log_message(self, format: str, *args: object) -> None:
        pass

    def handle_request(self) -> None:
        self.name = f"{self.command} {self.path}"
        path, self.query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        self.parts = [unquote(part) for part in path.strip("/").split("/")]
        self.record()
        self.unread = int(self.headers.get("Content-Length") or 0)
        self.error: ErrorResponse | None = None
        try:
            if (fault := self.fault(ON_REQUEST)) is not None:
                if fault.kind != "status":
                    del self.headers["Range"]
                if fault.kind == "body":
                    return self.respond(200, fault.body, fault.headers)
                if fault.kind == "status":
                    self.error = ErrorResponse(fault.status, "injected fault")
                    self.error.headers = dict(fault.headers)
                    if not fault.handled:
                        raise self.error
            self.route()
        except ErrorResponse as error:
            self.error = None
            codes = {"X-Error-Code": error.code, "X-Error-Message": str(error)}
            headers = {key: value for key, value in codes.items() if value} | error.headers
            self.respond_json({"error": str(error), **error.fields}, error.status, headers)
        except ConnectionError:  # the client disconnected, or a fault did
            self.close_connection, self.unread = True, 0
        finally:
            while self.unread and (chunk := self.rfile.read(min(self.unread, 1 << 20))):
                self.unread -= len(chunk)  # or it would be parsed as the next request

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def fault(self, kinds: tuple[str, ...], length: int = 0) -> Fault | None:
        """The fault of one of these kinds that applies to this request, if any."""
        faults = (fault for fault in self.server.faults if fault.kind in kinds)
        return next((fault for fault in faults if fault.applies_to(self.name, length)), None)

    def respond_json(
        self, value: object, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        self.respond(status, json.dumps(value).encode(), headers)

    def respond(
        self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> None:
        """Send a response, honoring the Range header and applying any fault."""
        if self.error is not None:
            raise self.error
        headers, size = dict(headers or {}), len(body)
        byte_range = self.headers.get("Range", "")
        if status == 200 and byte_range.startswith("bytes="):
            first, _, last = byte_range.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last) + 1, size) if last else size
            headers["Content-Range"], status = f"bytes {start}-{end - 1}/{size}", 206
            body = body[start:end]
            if start >= size:
                headers["Content-Range"], status = f"bytes */{size}", 416
        fault = self.fault(ON_RESPONSE, 0 if self.command == "HEAD" else len(body))
        if fault is not None and fault.kind == "length":
            body = body[: fault.at]
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        if fault is not None and fault.kind in ("reset", "stall") and fault.at == 0:
            return self.interrupt(fault)  # before anything was sent
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault is not None and fault.kind == "flip":
            body = body[: fault.at] + bytes([body[fault.at] ^ 1]) + body[fault.at + 1 :]
        interrupted = fault is not None and fault.kind in ("truncate", "reset", "stall")
        if interrupted:
            body = body[: fault.at]
        for at in range(0, len(body), CHUNK_SIZE):
            if fault is not None and fault.kind == "slow":
                self.server.closing.wait(fault.seconds)
            self.wfile.write(body[at : at + CHUNK_SIZE])
        if interrupted:
            self.interrupt(fault)

    def interrupt(self, fault: Fault) -> None:
        """Drop the connection mid-response: after a delay for a stall, by a reset or a close."""
        self.close_connection = True
        if fault.kind == "stall":
            self.server.closing.wait(fault.seconds)
        if fault.kind in ("reset", "hangup"):
            linger = struct.pack("ii", 1, 0)  # so that the other side gets "reset by peer"
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            os.close(self.connection.detach())  # close() would wait for rfile and wfile
            raise ConnectionResetError

    def read_body(self) -> bytes:
        length, self.unread = self.unread, 0
        return self.rfile.read(length)


class FileServer(Server):
    """Serves files by path."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(FileHandler)
        self.files = files


class FileHandler(Handler):
    server: FileServer

    def route(self) -> None:
        content = self.server.files.get("/".join(self.parts))
        if content is None:
            raise ErrorResponse(404, "no such file")
        self.respond(200, content, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"'})
