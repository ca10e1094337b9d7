"""What a person asks of a run that several processes do: a signal, or a file `stop` in its folder."""

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

ASKED = (signal.SIGINT, signal.SIGTERM)
STOP = "stop"  # a file below the folder of the run
TICK = 0.05  # seconds between two looks at processes
LOOK = 1.0  # seconds between two looks for the file


def stop_reason(number: signal.Signals, file: Path | None) -> str:
    """Who asked, in words: the file, for which a signal is sent and which lies there until the run has ended."""
    from_file = number == signal.SIGTERM and file is not None and file.exists()
    return f"the file {file}" if from_file else number.name


class StopRequests:
    """Signals that came for the run, while the `with` block lasts. The file counts as SIGTERM."""

    def __init__(self) -> None:
        self.came: list[signal.Signals] = []
        self.before = {}
        self.file: Path | None = None
        self.looked = 0.0
        self.found = False

    def __enter__(self) -> "StopRequests":
        self.before = {number: signal.signal(number, self.take) for number in ASKED}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        if self.file is not None and self.found:
            self.file.unlink(missing_ok=True)

    def take(self, number: int, frame: FrameType | None) -> None:
        self.came.append(signal.Signals(number))

    def watch(self, folder: Path | None) -> None:
        """Look for the file from now on. One that is there came too late for an earlier run."""
        if folder is not None:
            self.file = folder / STOP
            self.file.unlink(missing_ok=True)

    def look(self) -> None:
        """Whether the file has come; it is removed when all have left."""
        if self.file is not None and not self.found and time.monotonic() - self.looked > LOOK:
            self.looked = time.monotonic()
            if self.file.exists():
                self.found = True
                self.came.append(signal.SIGTERM)


class StopFile:
    """A run without others around it looks for the file itself, and sends itself the signal."""

    def __init__(self, folder: Path) -> None:
        self.file, self.over, self.found = folder / STOP, threading.Event(), False
        self.thread = threading.Thread(target=self.look, daemon=True)

    def __enter__(self) -> "StopFile":
        with suppress(NotADirectoryError):  # which is told when the folder is claimed
            self.file.unlink(missing_ok=True)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.thread.join()
        if self.found:
            self.file.unlink(missing_ok=True)

    def look(self) -> None:
        while not self.found and not self.over.wait(LOOK):
            if self.file.exists():
                self.found = True
                os.kill(os.getpid(), signal.SIGTERM)
