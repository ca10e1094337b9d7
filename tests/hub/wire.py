"""What goes over the wire between a client and the Hub of the tests, and what can go wrong there."""

import json
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.waiting import LIMIT


@dataclass
class Fault:
    """What goes wrong with the requests that fit: `times` of them, after the first `skip`.

    With a `code`, that is the answer. Else the connection ends: `cut` "request" while the body comes in, "reply" while
    the answer goes out, after `at` bytes; "lost" when everything is done, but nothing is answered. It is closed, or
    with `reset` broken off. `hold` is waited for before that.
    """

    method: str = ""
    path: str = ""
    code: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: Any = field(default_factory=dict)  # JSON, or the text of a page
    cut: str = ""
    at: int = 0
    reset: bool = False
    hold: Event | None = None
    skip: int = 0
    times: int = 1

    def fits(self, method: str, path: str) -> bool:
        if not (re.fullmatch(self.method or ".*", method) and re.search(self.path, path)):
            return False
        self.skip -= 1
        if self.skip >= 0 or self.times == 0:
            return False
        self.times -= 1
        return True


@dataclass
class Seen:
    """A request: bytes of bodies that came and went, and what was answered, 0 for nothing."""

    method: str
    path: str
    token: str | None
    range: str | None = None
    received: int = 0
    sent: int = 0
    code: int = 0


@dataclass
class Reply:
    """An answer; `data` of a file may be asked for in parts."""

    code: int = 200
    data: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


class Refused(Exception):
    """An answer that is none."""

    def __init__(self, code: int, message: str, kind: str = "", **body: Any) -> None:
        headers = {"X-Error-Message": message, **({"X-Error-Code": kind} if kind else {})}
        super().__init__(message)
        self.reply = Reply(code, json.dumps({"error": message} | body).encode(), headers)


@dataclass
class Asked:
    """A request as the routes see it."""

    token: str | None
    query: dict[str, list[str]]
    body: bytes
    range: str = ""
    user: Any = None  # who the token belongs to

    def json(self) -> Any:
        return json.loads(self.body)


ROUTES: list[tuple[tuple[str, ...], str, Callable[..., Any]]] = []


def taken(connection: socket.socket) -> bool:
    """Whether the client, a process of this machine, has read all that was sent to it, or is gone."""
    ours, theirs = (f":{port:04X}" for port in (connection.getsockname()[1], connection.getpeername()[1]))
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, _, queues, *_ = line.split()
        if local.endswith(theirs) and remote.endswith(ours):
            return queues.endswith(":00000000")
    return True


MODEL = "(?P<name>[^/]+/[^/]+)"


def route(verbs: str, pattern: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The function answers requests to paths of this pattern."""

    def keep(act: Callable[..., Any]) -> Callable[..., Any]:
        ROUTES.append((tuple(verbs.split()), pattern, act))
        return act

    return keep


class Handler(BaseHTTPRequestHandler):
    """From bytes to a request, from an answer to bytes, and what goes wrong between."""

    protocol_version = "HTTP/1.1"
    hub: Any

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        seen = Seen(self.command, self.path, token, self.headers.get("Range"))
        self.hub.log.append(seen)
        fault = self.hub.fault(self.command, self.path)
        try:
            body = b"".join(self.body(seen, fault.at if fault and fault.cut == "request" else 2**60))
        except ConnectionError:
            self.close_connection = True
            return None
        if fault and fault.hold:
            fault.hold.wait(LIMIT)
        if fault and fault.cut == "request":
            return self.hang_up(fault)
        if fault and fault.code:
            text = fault.body if isinstance(fault.body, str) else json.dumps(fault.body)
            return self.send(seen, Reply(fault.code, text.encode(), fault.headers), None)
        try:
            reply = self.hub.answer(self.command, url.path, Asked(token, parse_qs(url.query), body, seen.range or ""))
        except Refused as refused:
            reply = refused.reply
        return self.hang_up(fault) if fault and fault.cut == "lost" else self.send(seen, reply, fault)

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def body(self, seen: Seen, most: int) -> Iterator[bytes]:
        """What was sent, `most` bytes at most."""
        for size in self.sizes():
            while size and seen.received < most:
                data = self.rfile.read1(min(size, 2**16, most - seen.received))
                if not data:
                    raise ConnectionAbortedError("who asked has gone")
                size -= len(data)
                seen.received += len(data)
                yield data

    def sizes(self) -> Iterator[int]:
        """Of the pieces that a body comes in: one, or several with their sizes before them."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            yield int(self.headers.get("Content-Length") or 0)
            return
        while size := int(self.rfile.readline().split(b";")[0], 16):
            yield size
            self.rfile.readline()
        self.rfile.readline()

    def send(self, seen: Seen, reply: Reply, fault: Fault | None) -> None:
        code, data = reply.code, reply.data
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", seen.range or "")
        headers = {"Content-Type": "application/json"} | reply.headers
        if code == 200 and wanted and "Accept-Ranges" in reply.headers:
            first, last = int(wanted[1]), min(int(wanted[2] or 2**60), len(data) - 1)
            code = 206 if first < len(data) else 416
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}" if code == 206 else f"bytes */{len(data)}"
            data = data[first : last + 1]
        self.send_response(code)
        for key, word in headers.items():
            self.send_header(key, word)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        seen.code = code
        with suppress(ConnectionError):  # whoever asked may be gone
            for start in range(0, len(data) if self.command != "HEAD" else 0, 2**16):
                piece = data[start : min(start + 2**16, fault.at if fault and fault.cut == "reply" else 2**60)]
                self.wfile.write(piece)
                seen.sent += len(piece)
        if fault and fault.cut == "reply":
            self.hang_up(fault)

    def hang_up(self, fault: Fault) -> None:
        self.close_connection = True
        if fault.reset:
            while not taken(self.connection):  # what was sent arrives first: a reset would throw it away
                time.sleep(0.01)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            socket.close(self.connection.detach())
        else:
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *words: object) -> None:
        """Say nothing."""
