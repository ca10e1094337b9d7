"""Wait for other threads and processes, with a timeout."""

import subprocess
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 400.0  # longer waits count as hung


def wait_until(condition: Callable[[], object], *processes: subprocess.Popen[Any] | BaseProcess) -> None:
    """Wait until `condition()` is true. Raise AssertionError after the timeout or if a process ends."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        for process in processes:
            assert not has_ended(process), f"process ended: {output_or_exit_code(process)}"
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.005)


def has_ended(process: subprocess.Popen[Any] | BaseProcess) -> bool:
    code = process.poll() if isinstance(process, subprocess.Popen) else process.exitcode
    return code is not None


def has_exited(pid: int) -> bool:
    """Whether the process with this id has ended or is a zombie."""
    return read_process_state(pid) in "ZX"


def read_process_state(pid: int) -> str:
    """Return the state of a process as a letter, as in `ps`: X if it does not exist, T if it is stopped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends between open and read
        return "X"
    return fields[0] if fields else "X"


def output_or_exit_code(process: subprocess.Popen[Any] | BaseProcess) -> object:
    """Output of a process if it is piped, otherwise its exit code."""
    return process.communicate() if isinstance(process, subprocess.Popen) else process.exitcode
