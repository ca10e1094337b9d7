"""A server on this machine for the report of one run, which is written again when the run has new metrics."""

import threading
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tunekit.checkpoint import run_dir
from tunekit.config.secrets import message_text
from tunekit.errors import UserError, describe_exception
from tunekit.loggers import metrics_file
from tunekit.report.page import render_report
from tunekit.report.run_files import is_running, read_run

HOST = "127.0.0.1"
RELOAD_SECONDS = 5
READ_FILES = (run_dir.CONFIG, run_dir.METRICS, run_dir.RUN_INFO, run_dir.EVALUATION, run_dir.FINAL)
READ_FILES += (run_dir.COMPLETIONS, metrics_file.EPISODES)
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # the page itself has the rest
    "X-Content-Type-Options": "nosniff",
}
Stamp = tuple[object, ...]


class ReportServer(ThreadingHTTPServer):
    """Serves the page of a run at `/`, to this machine only. Other paths and host names are refused."""

    daemon_threads = True

    def __init__(self, directory: Path, port: int) -> None:
        self.directory = directory
        self.lock = threading.Lock()
        self.page: tuple[Stamp, bytes] | None = None
        read_run(directory)  # raises if it is no run directory
        try:
            super().__init__((HOST, port), ReportHandler)
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise UserError(f"--port: cannot listen on {HOST}:{port}: {reason}. Set another --port.") from None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def render(self) -> bytes:
        """The page, which is the same until a file of the run changes."""
        with self.lock:
            running = is_running(self.directory)
            files = [self.directory / name for name in READ_FILES]
            stats = [file.stat() if file.exists() else None for file in files]
            stamp = (running, *(stat and (stat.st_mtime_ns, stat.st_size) for stat in stats))
            if self.page is None or self.page[0] != stamp:
                html = render_report([read_run(self.directory)], RELOAD_SECONDS if running else 0)
                self.page = stamp, html.encode()
            return self.page[1]


class ReportHandler(BaseHTTPRequestHandler):
    """Answers one request."""

    timeout = 10  # seconds for a client to send its request

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def answer(self, with_body: bool) -> None:
        server = self.server
        assert isinstance(server, ReportServer)
        # A page of another site may have a host name that points to this machine.
        if self.headers.get("Host") not in (f"{HOST}:{server.server_port}", f"localhost:{server.server_port}"):
            self.send_error(HTTPStatus.FORBIDDEN)
        elif self.path != "/":
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            self.send_page(server, with_body)

    def send_page(self, server: ReportServer, with_body: bool) -> None:
        status, kind = HTTPStatus.OK, "text/html"
        try:
            body = server.render()
        except (UserError, OSError, KeyError, ValueError) as error:  # the run directory was deleted or damaged
            text = message_text(error) if isinstance(error, UserError | OSError) else describe_exception(error)
            status, kind, body = HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", text.encode()
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            with suppress(ConnectionError):  # the page was closed or reloaded
                self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged."""
