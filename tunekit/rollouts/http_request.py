"""One HTTP request with a deadline over the whole response, a limit on its size, and a way to end it early."""

import http.client
import io
import socket
import threading
import time
import urllib.request
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

BLOCK_BYTES = 65536


class Response(NamedTuple):
    """A response that was read completely."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes


class ResponseTooLargeError(Exception):
    """A response exceeds `Limits.max_bytes`."""


class Limits(NamedTuple):
    """Limits of a response, from its first header to its last byte."""

    deadline: float  # value of time.monotonic()
    max_bytes: int

    def remaining_seconds(self) -> float:
        """Time until the deadline. Raises TimeoutError after it."""
        if (seconds := self.deadline - time.monotonic()) > 0:
            return seconds
        raise TimeoutError


class OpenConnections:
    """Sockets of running requests, which `close` ends at once. Later requests fail."""

    def __init__(self) -> None:
        self.sockets: WeakSet[socket.socket] = WeakSet()
        self.lock = threading.Lock()
        self.closed = threading.Event()

    def add(self, sock: socket.socket) -> None:
        with self.lock:
            self.check()
            self.sockets.add(sock)

    def check(self) -> None:
        """Raise ConnectionAbortedError after `close`."""
        if self.closed.is_set():
            raise ConnectionAbortedError("the request was canceled")

    def close(self) -> None:
        self.closed.set()
        with self.lock:
            for sock in self.sockets:
                shut_down(sock)


def shut_down(sock: socket.socket) -> None:
    """End reads and writes of other threads. Closing it would give its number to other files, while they use it."""
    with suppress(OSError):  # the other end has closed it
        sock.shutdown(socket.SHUT_RDWR)


class LimitedReader(io.RawIOBase):
    """Bytes of a socket until the limits."""

    def __init__(self, sock: socket.socket, raw: io.RawIOBase, limits: Limits) -> None:
        self.sock, self.raw, self.limits, self.num_bytes = sock, raw, limits, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self.sock.settimeout(self.limits.remaining_seconds())
        count = self.raw.readinto(buffer)
        self.num_bytes += count or 0
        if self.num_bytes > self.limits.max_bytes:
            raise ResponseTooLargeError(
                f"the response has more than {self.limits.max_bytes:,} bytes (max_response_bytes)"
            )
        return count

    def close(self) -> None:
        self.raw.close()
        super().close()


class LimitedResponse(http.client.HTTPResponse):
    """Reads status line, headers and body within the limits."""

    def __init__(self, sock: socket.socket, *args: Any, limits: Limits, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        assert isinstance(self.fp, io.BufferedReader)
        self.fp = io.BufferedReader(LimitedReader(sock, self.fp.detach(), limits))


class LimitedConnection(http.client.HTTPConnection):
    """Connects and sends until the deadline as well."""

    def __init__(self, *args: Any, limits: Limits, connections: OpenConnections, **options: Any) -> None:
        super().__init__(*args, **options)
        self.limits, self.connections = limits, connections
        self.response_class = partial(LimitedResponse, limits=limits)  # pyright: ignore[reportAttributeAccessIssue]

    def connect(self) -> None:
        self.connections.check()
        self.timeout = self.limits.remaining_seconds()
        super().connect()
        self.connections.add(self.sock)

    def send(self, data: Any) -> None:
        if self.sock is not None:
            self.sock.settimeout(self.limits.remaining_seconds())
        super().send(data)


class LimitedTLSConnection(LimitedConnection, http.client.HTTPSConnection):
    """The same with TLS."""


class LimitedHandler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Opens limited connections, directly or through the proxy of the environment."""

    def __init__(self, limits: Limits, connections: OpenConnections) -> None:
        super().__init__()
        self.options = {"limits": limits, "connections": connections}

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(LimitedConnection, **self.options), req)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(LimitedTLSConnection, **self.options), req)


class AllStatuses(urllib.request.HTTPErrorProcessor):
    """Returns responses of any status. Redirects are not followed: the API key would reach another server."""

    def http_response(self, request: urllib.request.Request, response: Any) -> Any:
        return response

    https_response = http_response


def send_request(request: urllib.request.Request, limits: Limits, connections: OpenConnections) -> Response:
    """The response to a request, of any status. Raises OSError, HTTPException or ResponseTooLargeError."""
    opener = urllib.request.build_opener(LimitedHandler(limits, connections), AllStatuses)
    with opener.open(request, timeout=limits.remaining_seconds()) as response:
        return Response(response.status, response.headers, read_body(response))


def read_body(response: http.client.HTTPResponse) -> bytes:
    """All bytes of a response. Read in blocks: memory is never allocated for a length that is only announced."""
    blocks = []
    while block := response.read(BLOCK_BYTES):
        blocks.append(block)
    body = b"".join(blocks)
    if response.length:  # what is missing of the announced length
        raise http.client.IncompleteRead(body, response.length)
    return body
