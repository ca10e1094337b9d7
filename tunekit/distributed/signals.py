"""Requests to stop a run: SIGINT, SIGTERM, or a file `stop` in its output directory."""

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOP = "stop"  # file in the output directory
POLL_SECONDS = 0.05  # interval between checks of processes
STOP_FILE_POLL_SECONDS = 1.0  # interval between checks for the file


def stop_reason(number: signal.Signals, file: Path | None) -> str:
    """Source of a stop request: the file, which sends SIGTERM and exists until the run has ended, or the signal."""
    from_file = number == signal.SIGTERM and file is not None and file.exists()
    return f"the file {file}" if from_file else number.name


class StopRequests:
    """Signals received in a `with` block. The file `stop` counts as SIGTERM."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self.previous_handlers = {}
        self.file: Path | None = None
        self.last_poll = 0.0
        self.has_file = False

    def __enter__(self) -> "StopRequests":
        self.previous_handlers = {number: signal.signal(number, self.on_signal) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.previous_handlers.items():
            signal.signal(number, handler)
        if self.file is not None and self.has_file:
            self.file.unlink(missing_ok=True)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))

    def watch_file(self, output_dir: Path | None) -> None:
        """Start checking for the file. Removes a file left from an earlier run."""
        if output_dir is not None:
            self.file = output_dir / STOP
            self.file.unlink(missing_ok=True)

    def poll_file(self) -> None:
        """Check for the file. It is removed when the block ends."""
        if self.file is not None and not self.has_file and time.monotonic() - self.last_poll > STOP_FILE_POLL_SECONDS:
            self.last_poll = time.monotonic()
            if self.file.exists():
                self.has_file = True
                self.received.append(signal.SIGTERM)


class StopFile:
    """Thread that checks for the file in a run without a launcher, and sends SIGTERM to this process."""

    def __init__(self, output_dir: Path) -> None:
        self.file, self.closed, self.has_file = output_dir / STOP, threading.Event(), False
        self.thread = threading.Thread(target=self.run, daemon=True)

    def __enter__(self) -> "StopFile":
        with suppress(NotADirectoryError):  # reported when the run claims the directory
            self.file.unlink(missing_ok=True)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.closed.set()
        self.thread.join()
        if self.has_file:
            self.file.unlink(missing_ok=True)

    def run(self) -> None:
        while not self.has_file and not self.closed.wait(STOP_FILE_POLL_SECONDS):
            if self.file.exists():
                self.has_file = True
                os.kill(os.getpid(), signal.SIGTERM)
