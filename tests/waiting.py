"""Waiting for what a thread or another process does, but not for ever."""

import subprocess
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

LIMIT = 180.0  # seconds after which something hangs


def until(found: Callable[[], object], *processes: subprocess.Popen[Any] | BaseProcess) -> None:
    """Wait for something to be so; AssertionError if it does not come, or one of these processes ends before."""
    late = time.monotonic() + LIMIT
    while not found():
        for process in processes:
            assert not ended(process), f"it ended before: {last_words(process)}"
        assert time.monotonic() < late, "it did not come"
        time.sleep(0.005)


def ended(process: subprocess.Popen[Any] | BaseProcess) -> bool:
    code = process.poll() if isinstance(process, subprocess.Popen) else process.exitcode
    return code is not None


def last_words(process: subprocess.Popen[Any] | BaseProcess) -> object:
    """What it has printed into its pipes, or its exit code."""
    return process.communicate() if isinstance(process, subprocess.Popen) else process.exitcode
