"""A process that runs the checks of a job and sends their outcomes: `python -m tunekit.selftest.worker FD JOB`.

The parent process sees which check was running if this process crashes or hangs.
"""

import faulthandler
import json
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

import torch

from tunekit import devices
from tunekit.errors import UserError
from tunekit.selftest.context import CheckFunction, Context
from tunekit.selftest.result import CheckFailedError, CheckSkippedError, Outcome, Result
from tunekit.selftest.runner import NO_DEVICE

Send = Callable[[str | Outcome], None]  # "started", an outcome, or "closing": a new worker is needed


class Recorder:
    """`with Recorder(...)`: runs a check. Every error of the check becomes an outcome."""

    def __init__(self, name: str, send: Send) -> None:
        self.name, self.send = name, send
        self.result = Result("")
        self.is_broken = False  # the error may have left the device unusable

    def __enter__(self) -> "Recorder":
        self.start = time.perf_counter()
        self.send("started")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None and not isinstance(error, Exception):
            return False  # the user's Ctrl-C
        seconds = time.perf_counter() - self.start
        outcome = Outcome(self.name, "passed", seconds, self.result.detail, self.result.values)
        if isinstance(error, CheckSkippedError):
            outcome = Outcome(self.name, "skipped", seconds, str(error))
        elif isinstance(error, CheckFailedError):
            outcome = Outcome(self.name, "failed", seconds, str(error))
        elif error is not None:
            traceback.print_exception(error)
            outcome = Outcome(self.name, "failed", seconds, describe_error(error))
            self.is_broken = True
        self.send(outcome)
        return True


def describe_error(error: BaseException) -> str:
    """Class, message and innermost line of tunekit of an error, on one line and without paths."""
    text = " ".join(str(error).split())
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "torch" not in Path(frame.filename).parts]
    at = f" (at {Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text[:400]}{at}"


def run_checks(job: dict[str, Any], send: Send) -> None:
    """Run checks until the last one, or until an error may have left the GPU unusable: the parent starts a new worker
    for the others."""
    try:
        device = devices.select_device(job["device"])
    except UserError:
        raise SystemExit(NO_DEVICE) from None
    if job["device"] not in ("auto", device.type):
        raise SystemExit(NO_DEVICE)
    for name, module in job["checks"]:
        with TemporaryDirectory(dir=job["directory"]) as directory, Recorder(name, send) as recorder:
            function: CheckFunction = import_module(module).FUNCTIONS[name.rpartition(".")[2]]
            torch.manual_seed(0)
            recorder.result = function(Context(device, Path(directory)))
        if recorder.is_broken and device.type != "cpu":
            send("closing")
            return


def main() -> None:
    """Run the checks of the job, and send the outcomes."""
    faulthandler.enable()
    with Connection(int(sys.argv[1]), readable=False) as connection:
        run_checks(json.loads(sys.argv[2]), connection.send)


if __name__ == "__main__":
    main()
