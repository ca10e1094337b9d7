"""Requests to stop a run: SIGINT, SIGTERM, SIGHUP, SIGQUIT, or a file `stop` in its output directory."""

import os
import signal
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
STOP = "stop"  # file in the output directory
POLL_SECONDS = 0.05  # interval between checks of processes
STOP_FILE_POLL_SECONDS = 1.0  # interval between checks for the file


def handle_stop_signals(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Install a handler and return the previous ones. SIGHUP stays ignored in processes that `nohup` has started."""
    return {number: signal.signal(number, handler) for number in STOP_SIGNALS if not is_kept_ignored(number)}


def is_kept_ignored(number: int) -> bool:
    """Whether a process was started to ignore SIGHUP, as `nohup` does."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def write_notice(number: int, text: str) -> None:
    """Write to stderr from a signal handler. After SIGHUP the terminal is gone: later output is discarded."""
    with suppress(OSError):
        os.write(2, text.encode())
    if number == signal.SIGHUP:
        discard = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            if stat.S_ISCHR(os.fstat(stream).st_mode):
                os.dup2(discard, stream)
        os.close(discard)


def stop_reason(number: signal.Signals, file: Path | None) -> str:
    """Source of a stop request: the file, which sends SIGTERM and exists until the run has ended, or the signal."""
    from_file = number == signal.SIGTERM and file is not None and file.exists()
    return f"the file {file}" if from_file else number.name


class StopRequests:
    """Signals received in a `with` block."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self.previous_handlers = {}

    def __enter__(self) -> "StopRequests":
        self.previous_handlers = handle_stop_signals(self.on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.previous_handlers.items():
            signal.signal(number, handler)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))


class StopFile:
    """Thread that checks for the file, and sends SIGTERM to this process. The file is removed when the block ends."""

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
