"""HTTP handler of the test Hub, and the failures that tests inject."""

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

from tests.helpers.wait import TIMEOUT_SECONDS


@dataclass
class Fault:
    """A failure of `times` matching requests, after the first `skip`.

    With a `code`, it is the reply. Otherwise the connection is closed, or reset with `reset`: `cut` "request" after
    `at` bytes of the request body, "reply" after `at` bytes of the reply, "lost" after the request is handled but
    before the reply. `until` delays the failure until the event is set.
    """

    method: str = ""
    path: str = ""
    code: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: Any = field(default_factory=dict)  # JSON, or text
    cut: str = ""
    at: int = 0
    reset: bool = False
    until: Event | None = None
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
class LoggedRequest:
    """A logged request: bytes of the bodies that were received and sent, and the status, 0 without a reply."""

    method: str
    path: str
    token: str | None
    range: str | None = None
    received: int = 0
    sent: int = 0
    code: int = 0


@dataclass
class Reply:
    """A reply. Clients can request ranges of its `data`."""

    code: int = 200
    data: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


class RequestError(Exception):
    """An error reply."""

    def __init__(self, code: int, message: str, kind: str = "", **body: Any) -> None:
        headers = {"X-Error-Message": message, **({"X-Error-Code": kind} if kind else {})}
        super().__init__(message)
        self.reply = Reply(code, json.dumps({"error": message} | body).encode(), headers)


@dataclass
class Request:
    """A request, as route handlers get it."""

    token: str | None
    query: dict[str, list[str]]
    body: bytes
    range: str = ""
    user: Any = None  # owner of the token

    def json(self) -> Any:
        return json.loads(self.body)


ROUTES: list[tuple[tuple[str, ...], str, Callable[..., Any]]] = []


def has_read_everything(connection: socket.socket) -> bool:
    """Return whether the local client has read everything that was sent, or has closed the connection."""
    local_port, remote_port = (f":{port:04X}" for port in (connection.getsockname()[1], connection.getpeername()[1]))
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, _, queues, *_ = line.split()
        if local.endswith(remote_port) and remote.endswith(local_port):
            return queues.endswith(":00000000")
    return True


MODEL = "(?P<name>[^/]+/[^/]+)"


def route(verbs: str, pattern: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function for requests to paths of this pattern."""

    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        ROUTES.append((tuple(verbs.split()), pattern, handler))
        return handler

    return register


class Handler(BaseHTTPRequestHandler):
    """Parse requests, write replies, and inject failures."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # the body of a reply would wait 40 ms for the acknowledgment of its headers
    hub: Any

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        seen = LoggedRequest(self.command, self.path, token, self.headers.get("Range"))
        self.hub.log.append(seen)
        fault = self.hub.fault(self.command, self.path)
        try:
            body = b"".join(self.body(seen, fault.at if fault and fault.cut == "request" else 2**60))
        except ConnectionError:
            self.close_connection = True
            return None
        if fault and fault.until:
            fault.until.wait(TIMEOUT_SECONDS)
        if fault and fault.cut == "request":
            return self.hang_up(fault)
        if fault and fault.code:
            text = fault.body if isinstance(fault.body, str) else json.dumps(fault.body)
            return self.send(seen, Reply(fault.code, text.encode(), fault.headers), None)
        try:
            reply = self.hub.answer(self.command, url.path, Request(token, parse_qs(url.query), body, seen.range or ""))
        except RequestError as refused:
            reply = refused.reply
        return self.hang_up(fault) if fault and fault.cut == "lost" else self.send(seen, reply, fault)

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def body(self, seen: LoggedRequest, max_bytes: int) -> Iterator[bytes]:
        """Yield the request body, at most `most` bytes."""
        for size in self.sizes():
            while size and seen.received < max_bytes:
                data = self.rfile.read1(min(size, 2**16, max_bytes - seen.received))
                if not data:
                    raise ConnectionAbortedError("the client closed the connection")
                size -= len(data)
                seen.received += len(data)
                yield data

    def sizes(self) -> Iterator[int]:
        """Sizes of the chunks of a body. Without chunked encoding it is a single one."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            yield int(self.headers.get("Content-Length") or 0)
            return
        while size := int(self.rfile.readline().split(b";")[0], 16):
            yield size
            self.rfile.readline()
        self.rfile.readline()

    def send(self, seen: LoggedRequest, reply: Reply, fault: Fault | None) -> None:
        code, data = reply.code, reply.data
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", seen.range or "")
        headers = {"Content-Type": "application/json"} | reply.headers
        if code == 200 and match and "Accept-Ranges" in reply.headers:
            first, last = int(match[1]), min(int(match[2] or 2**60), len(data) - 1)
            code = 206 if first < len(data) else 416
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}" if code == 206 else f"bytes */{len(data)}"
            data = data[first : last + 1]
        self.send_response(code)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        seen.code = code
        with suppress(ConnectionError):  # the client may have closed the connection
            for start in range(0, len(data) if self.command != "HEAD" else 0, 2**16):
                piece = data[start : min(start + 2**16, fault.at if fault and fault.cut == "reply" else 2**60)]
                self.wfile.write(piece)
                seen.sent += len(piece)
        if fault and fault.cut == "reply":
            self.hang_up(fault)

    def hang_up(self, fault: Fault) -> None:
        self.close_connection = True
        if fault.reset:
            while not has_read_everything(self.connection):  # a reset would discard data that the client has not read
                time.sleep(0.01)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            socket.close(self.connection.detach())
        else:
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *words: object) -> None:
        """Log nothing."""
