"""HTTP for the loopback Hub, and what goes wrong with it where a test orders so."""

from __future__ import annotations

import io
import json
import os
import socket
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import parse_qs, unquote, urlsplit

from hub_store import Refusal

PIECE = 16 << 10

Kind = Literal["status", "truncate", "reset", "stall", "slow", "flip", "length", "hangup"]
ON_ARRIVAL = ("status",)
ON_UPLOAD = ("hangup", "slow")
ON_ANSWER = ("truncate", "reset", "stall", "slow", "flip", "length")


@dataclass
class Fault:
    """What happens to the nth request whose "METHOD /path" holds `where`, and to those after it.

    status      the answer is `status`, with the Hub's X-Error-Code `code`, and nothing is done
    truncate    the answer ends after `at` bytes
    reset       the connection is reset after `at` bytes of the answer; 0: before the first word
    stall       nothing comes for `seconds` after `at` bytes; 0: before the first word
    slow        every piece of 16 KiB takes `seconds`, going or coming
    flip        a bit of the byte `at` is another
    length      the answer is `at` bytes long, and says so
    hangup      the connection is reset after `at` bytes of what is uploaded

    Answers that have no byte `at` are not counted.
    """

    kind: Kind
    where: str = ""
    at: int = 0
    nth: int = 1
    times: int = 1
    """So many requests in a row, from the nth on."""
    seconds: float = 30.0
    status: int = 500
    code: str = ""
    seen: int = 0
    """Requests that it could have happened to."""
    struck: int = 0
    """Requests that it happened to."""

    def strikes(self, request: str, length: int) -> bool:
        """Whether this request is one of them; `length` bytes are to be sent."""
        needs_a_byte = self.at > 0 or self.kind not in ("status", "reset", "stall")
        if self.where not in request or (needs_a_byte and self.at >= length):
            return False
        self.seen += 1
        if not self.nth <= self.seen < self.nth + self.times:
            return False
        self.struck += 1
        return True


class Faulty(Protocol):
    """What the handler needs to know of the Hub."""

    faults: list[Fault]
    asked: list[str]
    ranges: list[str]
    closing: threading.Event


class FaultyHandler(BaseHTTPRequestHandler):
    """One connection: reads requests, and sends the answers that `route` gives."""

    protocol_version = "HTTP/1.1"
    hub: Faulty

    def log_message(self, format: str, *args: object) -> None:
        pass

    # From the request to the answer -------------------------------------------------------------

    def handle_request(self) -> None:
        self.request_name = f"{self.command} {self.path}"
        self.hub.asked.append(self.request_name)
        self.hub.ranges.append(self.headers.get("Range", ""))
        self.body_length = int(self.headers.get("Content-Length") or 0)
        path, self.query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        self.parts = [unquote(part) for part in path.strip("/").split("/")]
        try:
            if (fault := self.fault(ON_ARRIVAL)) is not None:
                raise Refusal(fault.status, "ordered by a test", fault.code)
            self.route()
        except Refusal as no:
            headers = {"X-Error-Code": no.code, "X-Error-Message": str(no)}
            headers = {key: value for key, value in headers.items() if value}
            self.answer_json({"error": str(no), **no.fields}, no.status, headers)
        except ConnectionError:  # the client has gone, or a fault made it go
            self.close_connection, self.body_length = True, 0
        finally:
            self.skip_body()

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_request

    def route(self) -> None:
        """Answers the request, or raises Refusal."""
        raise NotImplementedError

    def fault(self, kinds: tuple[str, ...], length: int = 0) -> Fault | None:
        """The fault of one of these kinds that was ordered for this request."""
        for fault in self.hub.faults:
            if fault.kind in kinds and fault.strikes(self.request_name, length):
                return fault
        return None

    def answer_json(
        self, value: object, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        self.answer(status, json.dumps(value).encode(), headers)

    def answer(
        self, status: int, body: bytes | Path = b"", headers: Mapping[str, str] | None = None
    ) -> None:
        """Sends an answer: a file by the Range that was asked for, and altered by a fault."""
        size = len(body) if isinstance(body, bytes) else body.stat().st_size
        headers, begin, end = dict(headers or {}), 0, size
        asked = self.headers.get("Range", "")
        if isinstance(body, Path) and asked.startswith("bytes="):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last) + 1, size) if last else size
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
            status = 206
            if begin >= size:
                headers["Content-Range"], status, begin, end = f"bytes */{size}", 416, 0, 0
        length = end - begin
        fault = self.fault(ON_ANSWER, 0 if self.command == "HEAD" else length)
        if fault is not None and fault.kind == "length":
            length, end = fault.at, begin + fault.at
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(key, value)
        if fault is not None and fault.kind in ("reset", "stall") and fault.at == 0:
            return self.interrupt(fault)  # before a word was said
        self.end_headers()
        if self.command != "HEAD":
            self.send_body(body, begin, end, fault)

    def send_body(self, body: bytes | Path, begin: int, end: int, fault: Fault | None) -> None:
        """Sends a part of a content, up to where the fault ends it."""
        with io.BytesIO(body) if isinstance(body, bytes) else open(body, "rb") as source:
            source.seek(begin)
            sent, cut = 0, None
            while cut is None and (piece := source.read(min(PIECE, end - begin - sent))):
                if fault is not None and fault.kind == "slow":
                    self.hub.closing.wait(fault.seconds)
                elif fault is not None and sent <= fault.at < sent + len(piece):
                    at = fault.at - sent
                    if fault.kind == "flip":
                        piece = piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :]
                    else:
                        piece, cut = piece[:at], fault
                self.wfile.write(piece)
                sent += len(piece)
        if cut is not None:
            self.interrupt(cut)

    def interrupt(self, fault: Fault) -> None:
        """Ends the connection in the middle, at once or after a while, politely or not."""
        self.close_connection = True
        if fault.kind == "stall":
            self.hub.closing.wait(fault.seconds)
        if fault.kind in ("reset", "hangup"):
            linger = struct.pack("ii", 1, 0)  # so that the other side hears "reset by peer"
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            os.close(self.connection.detach())  # close() would wait for rfile and wfile
            raise ConnectionResetError

    def read_body(self) -> bytes:
        length, self.body_length = self.body_length, 0
        return self.rfile.read(length)

    def read_slowly(self, size: int, seconds: float) -> bytes:
        """A piece of what is uploaded."""
        self.hub.closing.wait(seconds)
        return self.rfile.read(min(size, PIECE))

    def read_json(self) -> dict[str, Any]:
        return json.loads(self.read_body() or b"{}")

    def skip_body(self) -> None:
        """Reads what of a request was not read: it would be taken for the next one."""
        while self.body_length and (piece := self.rfile.read(min(self.body_length, 1 << 20))):
            self.body_length -= len(piece)
