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


class Wishes:
    """Signals that came for the run, while the `with` block lasts. The file counts as SIGTERM."""

    def __init__(self) -> None:
        self.came: list[signal.Signals] = []
        self.before = {}
        self.file: Path | None = None
        self.looked = 0.0

    def __enter__(self) -> "Wishes":
        self.before = {number: signal.signal(number, self.take) for number in ASKED}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def take(self, number: int, frame: FrameType | None) -> None:
        self.came.append(signal.Signals(number))

    def watch(self, folder: Path | None) -> None:
        """Look for the file from now on. One that is there came too late for an earlier run."""
        if folder is not None:
            self.file = folder / STOP
            self.file.unlink(missing_ok=True)

    def look(self) -> None:
        """Whether the file has come; it is removed."""
        if self.file is not None and time.monotonic() - self.looked > LOOK:
            self.looked = time.monotonic()
            if self.file.exists():
                self.file.unlink(missing_ok=True)
                self.came.append(signal.SIGTERM)


class StopFile:
    """A run without others around it looks for the file itself, and sends itself the signal."""

    def __init__(self, folder: Path) -> None:
        self.file, self.over = folder / STOP, threading.Event()
        self.thread = threading.Thread(target=self.look, daemon=True)

    def __enter__(self) -> "StopFile":
        with suppress(NotADirectoryError):  # which is told when the folder is claimed
            self.file.unlink(missing_ok=True)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.thread.join()

    def look(self) -> None:
        while not self.over.wait(LOOK):
            if self.file.exists():
                self.file.unlink(missing_ok=True)
                os.kill(os.getpid(), signal.SIGTERM)
