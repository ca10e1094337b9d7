"""Runs the application on a socket until a signal ends it."""

import signal
import socket
from types import FrameType

import uvicorn

from tunekit.errors import UserError
from tunekit.serving.app import ModelServer

BACKLOG = 2048  # connections that wait to be accepted


def bind_socket(host: str, port: int) -> socket.socket:
    """Socket of an address. Raises UserError if it is not available, before any weights are read."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        result = socket.socket(family, socket.SOCK_STREAM)
        result.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        result.bind((host, port))
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"--port: cannot listen on {host}:{port}: {reason}. Set another --host or --port.") from None
    return result


class GracefulServer(uvicorn.Server):
    """Ends after the first SIGTERM or SIGINT when running requests are answered; after the second one at once."""

    def __init__(self, server: ModelServer, host: str) -> None:
        super().__init__(uvicorn.Config(server, log_level="warning", access_log=False, backlog=BACKLOG))
        self.server, self.host = server, host

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            names = ", ".join((self.server.name, *self.server.adapters.states))
            print(f"serving {names} at http://{self.host}:{sockets[0].getsockname()[1]}/v1", flush=True)

    async def on_tick(self, counter: int) -> bool:
        """Whether to end. Until running requests are answered, new ones and /health get status 503."""
        return await super().on_tick(counter) and (self.force_exit or not self.server.num_active)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.server.is_draining = True
        if self.should_exit:
            self.force_exit = True
        elif self.server.num_active:
            name = signal.Signals(sig).name
            print(f"{name}: finishing {self.server.num_active} answers; again to stop at once", flush=True)
        self.should_exit = True


def serve_requests(server: ModelServer, listener: socket.socket, host: str) -> None:
    """Serve until a signal."""
    GracefulServer(server, host).run(sockets=[listener])
