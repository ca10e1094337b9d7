"""Runs Python code that a model wrote in a process that can do no harm. docs/environments.md states the guarantees."""

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from tunekit.errors import FieldError, UserError

CHILD = Path(__file__).with_name("sandbox_child.py")
POLL_SECONDS = 0.05  # time between two looks at the files of the process
READ_SIZE = 65536
KEPT_VARIABLES = ("LD_LIBRARY_PATH", "SYSTEMROOT")  # that Python may need to start

Outcome = Literal["ok", "error", "timeout", "output", "files", "killed"]


@dataclass(frozen=True)
class SandboxConfig:
    """Limits of a program. It never has network access, and reads only the standard library and its own files."""

    timeout_seconds: float = 5.0  # Longest run time; also limits CPU time
    memory_mb: int = 512  # Address space in MB
    file_mb: int = 10  # Size of all files that the program writes, in MB
    max_files: int = 100  # Number of files that the program writes
    output_kb: int = 256  # Size of what the program prints, in KB

    def __post_init__(self) -> None:
        for key in ("timeout_seconds", "memory_mb", "file_mb", "max_files", "output_kb"):
            if getattr(self, key) <= 0:
                raise FieldError(key, f"must be > 0, got {getattr(self, key)}")
        if self.memory_mb < 64:
            raise FieldError("memory_mb", f"must be >= 64, Python needs that much, got {self.memory_mb}")


@dataclass(frozen=True)
class SandboxResult:
    """Output of a program (stdout and stderr) and how it ended.

    `ok`: exit code 0; `error`: another code; `timeout`, `output`, `files`: a limit; `killed`: a signal, such as that of
    the CPU limit.
    """

    output: str
    outcome: Outcome

    def describe(self, limits: SandboxConfig) -> str:
        """The output, and a last line that names the limit that ended the program."""
        reasons = {
            "timeout": f"TimeoutError: stopped after {limits.timeout_seconds:g} seconds",
            "output": f"Error: stopped after {limits.output_kb} KB of output",
            "files": f"Error: stopped after writing {limits.file_mb} MB or {limits.max_files} files",
            "killed": "Error: the program was killed",
        }
        return "\n".join(filter(None, (self.output.rstrip("\n"), reasons.get(self.outcome))))


@cache
def require_sandbox() -> None:
    """Raise UserError if this system cannot lock a process down."""
    run_python("pass", SandboxConfig(timeout_seconds=30))


def run_python(program: str, limits: SandboxConfig) -> SandboxResult:
    """Run a program. Raises UserError, without running it, if the process cannot be locked down."""
    if sys.platform != "linux":
        raise UserError("sandbox: needs Linux with Landlock (5.13 or newer). Run code on such a machine.")
    with tempfile.TemporaryDirectory(prefix="tunekit-sandbox-") as directory:
        process, status = start(program, limits, directory)
        with process, os.fdopen(status, "rb") as status_file:
            try:
                output, outcome = read_output(process, limits, Path(directory))
            finally:
                kill(process)
            problem = status_file.read().decode(errors="replace")
            if problem != "ok" and (problem or outcome != "timeout"):
                raise UserError(
                    f"sandbox: the process cannot be locked down: {problem or output[-300:]}. Code runs only on Linux "
                    "5.13 or newer with Landlock and seccomp enabled; in a container, allow them."
                )
        return SandboxResult(output, outcome)


def start(program: str, limits: SandboxConfig, directory: str) -> tuple[subprocess.Popen[bytes], int]:
    """Start the process in a session of its own. Also returns a pipe on which it says that it is locked down."""
    reader, writer = os.pipe()
    request = {
        "program": program,
        "status_fd": writer,
        "limits": {
            "directory": directory,
            "cpu_seconds": math.ceil(limits.timeout_seconds) + 1,
            "memory_bytes": limits.memory_mb << 20,
            "file_bytes": limits.file_mb << 20,
            "open_files": 32,
        },
    }
    environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    with tempfile.TemporaryFile() as stdin:
        stdin.write(json.dumps(request).encode())
        stdin.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(CHILD)],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env={**environment, "HOME": directory, "TMPDIR": directory},
            pass_fds=(writer,),
            start_new_session=True,
        )
    os.close(writer)
    return process, reader


def read_output(process: subprocess.Popen[bytes], limits: SandboxConfig, directory: Path) -> tuple[str, Outcome]:
    """Output of the process until it ends or exceeds a limit."""
    assert process.stdout is not None
    deadline = time.monotonic() + limits.timeout_seconds
    chunks: list[bytes] = []
    size, outcome, is_open = 0, None, True
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while is_open and outcome is None:
            if selector.select(POLL_SECONDS):
                chunks.append(os.read(process.stdout.fileno(), READ_SIZE))
                is_open, size = bool(chunks[-1]), size + len(chunks[-1])
            outcome = exceeded_limit(size, deadline, limits, directory)
    output = b"".join(chunks)[: limits.output_kb << 10].decode("utf-8", "replace")
    if outcome is not None:
        return output, outcome
    try:
        code = process.wait(max(deadline - time.monotonic(), POLL_SECONDS))
    except subprocess.TimeoutExpired:  # it has closed its output
        return output, "timeout"
    return output, "ok" if code == 0 else "error" if code > 0 else "killed"


def exceeded_limit(size: int, deadline: float, limits: SandboxConfig, directory: Path) -> Outcome | None:
    """Limit that a running process exceeds."""
    if time.monotonic() > deadline:
        return "timeout"
    if size > limits.output_kb << 10:
        return "output"
    sizes = []
    with os.scandir(directory) as entries:  # flat: the process cannot create directories
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                sizes.append(entry.stat(follow_symlinks=False).st_size)
    return "files" if len(sizes) > limits.max_files or sum(sizes) > limits.file_mb << 20 else None


def kill(process: subprocess.Popen[bytes]) -> None:
    """End the process and its group. It cannot leave the group or start other processes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
