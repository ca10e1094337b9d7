"""Runs Python code that a model wrote in a process that can do no harm. docs/environments.md states the guarantees."""

import contextlib
import json
import math
import os
import secrets
import selectors
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from tunekit.errors import FieldError, UserError, check_range

CHILD = Path(__file__).with_name("sandbox_child.py")
POLL_SECONDS = 0.05  # time between two looks at the files of the process
READ_SIZE = 65536
MAX_STATUS_BYTES = 1000
KEPT_VARIABLES = ("LD_LIBRARY_PATH", "SYSTEMROOT")  # that Python may need to start

Outcome = Literal["ok", "error", "timeout", "output", "files", "killed"]


@dataclass(frozen=True)
class SandboxConfig:
    """Limits of a program. It never has network access, and reads only the standard library and its own files."""

    timeout_seconds: float = 5.0  # Longest run time; also limits CPU time
    max_memory_mb: int = 512  # Address space in MB
    max_file_mb: int = 10  # Size of all files that the program writes, in MB
    max_files: int = 100  # Number of files that the program writes
    max_output_kb: int = 256  # Size of what the program prints, in KB

    def __post_init__(self) -> None:
        check_range(self, "timeout_seconds", "max_memory_mb", "max_file_mb", "max_files", "max_output_kb", gt=0)
        if self.max_memory_mb < 64:
            raise FieldError("max_memory_mb", f"must be >= 64, Python needs that much, got {self.max_memory_mb}")


@dataclass(frozen=True)
class SandboxResult:
    """Output of a program (stdout and stderr) and how it ended.

    `ok`: exit code 0; `error`: another code; `timeout`, `output`, `files`: a limit; `killed`: a signal, such as that of
    the CPU limit.
    """

    output: str
    outcome: Outcome
    num_completed: int = field(default=0, compare=False)  # programs and continuations that ended without an error

    def describe(self, limits: SandboxConfig) -> str:
        """The output, and a last line that names the limit that ended the program."""
        reasons = {
            "timeout": f"TimeoutError: stopped after {limits.timeout_seconds:g} seconds",
            "output": f"Error: stopped after {limits.max_output_kb} KB of output",
            "files": f"Error: stopped after writing {limits.max_file_mb} MB or {limits.max_files} files",
            "killed": "Error: the program was killed",
        }
        return "\n".join(filter(None, (self.output.rstrip("\n"), reasons.get(self.outcome))))


@cache
def require_sandbox() -> None:
    """Raise UserError if this system cannot lock a process down."""
    run_python("pass", SandboxConfig(timeout_seconds=30))


def run_python(program: str, limits: SandboxConfig, *continuations: str) -> SandboxResult:
    """Run a program. Raises UserError, without running it, if the process cannot be locked down.

    Continuations run in its process and namespace; each reaches the process when the one before has ended.
    """
    if sys.platform != "linux":
        raise UserError("sandbox: needs Linux 6.2 or newer, with Landlock. Run code on such a machine.")
    with tempfile.TemporaryDirectory(prefix="tunekit-sandbox-") as directory:
        end_token = secrets.token_hex(16)
        process, status = start_program(program, limits, directory, end_token)
        with process, ContinuationWriter(process, status, end_token, continuations) as writer:
            try:
                output, outcome = read_output(process, writer, limits, Path(directory))
            finally:
                kill_process(process)
            problem = writer.read_problem()
            if problem or (not writer.is_locked_down and outcome != "timeout"):
                raise UserError(
                    f"sandbox: the process cannot be locked down: {problem or output[-300:]}. Code runs only on Linux "
                    "6.2 or newer with Landlock and seccomp enabled; in a container, allow them."
                )
        return SandboxResult(output, outcome, writer.num_completed)


class ContinuationWriter:
    """Writes continuations to the stdin of a process, each after the end of the program before it.

    The process reports on the pipe `status`: "ok" or an error message, then `end_token` after each program.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], status: int, end_token: str, continuations: Sequence[str]
    ) -> None:
        assert process.stdin is not None
        self.stdin, self.status, self.continuations = process.stdin, status, continuations
        self.text, self.end_token = b"", end_token.encode()
        self.num_completed = 0  # programs that have ended without an error
        self.ended = threading.Semaphore(0)  # such programs whose continuation is not written yet

    def __enter__(self) -> "ContinuationWriter":
        self.thread = threading.Thread(target=self.run, daemon=True)  # a pipe that is full does not hold up the reader
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.ended.release(len(self.continuations) + 1)  # the process has ended, so writing to it fails
        self.thread.join()
        os.close(self.status)

    def run(self) -> None:
        with contextlib.suppress(OSError), self.stdin:
            for program in self.continuations:
                self.ended.acquire()
                self.stdin.write(json.dumps(program).encode() + b"\n")
                self.stdin.flush()

    def receive(self) -> bool:
        """Read the status pipe. Returns False at its end."""
        received = os.read(self.status, READ_SIZE)
        self.text = (self.text + received)[: MAX_STATUS_BYTES + len(self.end_token) * (len(self.continuations) + 1)]
        if self.is_locked_down and (count := self.text.count(self.end_token) - self.num_completed):
            self.num_completed += count
            self.ended.release(count)
        return bool(received)

    @property
    def is_locked_down(self) -> bool:
        return self.text.startswith(b"ok")

    def read_problem(self) -> str:
        """Why a process that has ended could not be locked down; empty if it was, or did not get that far."""
        while self.receive():
            pass
        return "" if self.is_locked_down else self.text.decode(errors="replace")


def start_program(
    program: str, limits: SandboxConfig, directory: str, end_token: str
) -> tuple[subprocess.Popen[bytes], int]:
    """Start the process in a session of its own. Also returns its status pipe; see `ContinuationWriter`."""
    reader, writer = os.pipe()
    request = {
        "program": program,
        "status_fd": writer,
        "end_token": end_token,
        "parent": os.getpid(),
        "limits": {
            "directory": directory,
            "cpu_seconds": math.ceil(limits.timeout_seconds) + 1,
            "memory_bytes": limits.max_memory_mb << 20,
            "file_bytes": limits.max_file_mb << 20,
            "open_files": 32,
        },
    }
    environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(CHILD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=directory,
        env={**environment, "HOME": directory, "TMPDIR": directory},
        pass_fds=(writer,),
        start_new_session=True,
    )
    os.close(writer)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it could not start
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
    return process, reader


def read_output(
    process: subprocess.Popen[bytes], writer: ContinuationWriter, limits: SandboxConfig, directory: Path
) -> tuple[str, Outcome]:
    """Output of the process until it ends or exceeds a limit."""
    assert process.stdout is not None
    deadline = time.monotonic() + limits.timeout_seconds
    chunks: list[bytes] = []
    size, outcome, is_open = 0, None, True
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        selector.register(writer.status, selectors.EVENT_READ)
        while outcome is None and (is_open or process.poll() is None):
            if not is_open:  # the process is about to end, or it has closed its output
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_SECONDS)
            for key, _ in selector.select(POLL_SECONDS if is_open else 0):
                if key.fd == writer.status:
                    if not writer.receive():
                        selector.unregister(writer.status)
                    continue
                chunks.append(os.read(key.fd, READ_SIZE))
                is_open, size = bool(chunks[-1]), size + len(chunks[-1])
                if not is_open:
                    selector.unregister(process.stdout)
            outcome = exceeded_limit(process.pid, size, deadline, limits, directory)
    output = b"".join(chunks)[: limits.max_output_kb << 10].decode("utf-8", "replace")
    code = process.poll()
    if outcome is not None or code is None:
        return output, outcome or "timeout"
    return output, "ok" if code == 0 else "error" if code > 0 else "killed"


def exceeded_limit(pid: int, size: int, deadline: float, limits: SandboxConfig, directory: Path) -> Outcome | None:
    """Limit that a running process exceeds."""
    if time.monotonic() > deadline:
        return "timeout"
    if size > limits.max_output_kb << 10:
        return "output"
    sizes = file_sizes(pid, directory, limits.max_file_mb << 20)
    return "files" if len(sizes) > limits.max_files or sum(sizes) > limits.max_file_mb << 20 else None


def file_sizes(pid: int, directory: Path, max_bytes: int) -> Collection[int]:
    """Sizes of all files that a process has written, also of removed ones, which exist as long as they are open.

    A removed file that is only mapped into memory has an unknown size, at most that of the limit.
    """
    sizes: dict[tuple[int, int], int] = {}  # by device and inode
    process, prefix = Path("/proc", str(pid)), f"{directory.resolve()}/"
    with contextlib.suppress(OSError):  # the process has ended
        for line in (process / "maps").read_text(errors="replace").splitlines():
            _, _, _, device, inode, *path = line.split(maxsplit=5)
            if path and path[0].startswith(prefix) and path[0].endswith(" (deleted)"):
                major, minor = device.split(":")
                sizes[os.makedev(int(major, 16), int(minor, 16)), int(inode)] = max_bytes
    for path in list_paths(directory):  # it is flat: the process cannot create directories
        with contextlib.suppress(OSError):  # it exists no more
            status = os.lstat(path)
            sizes[status.st_dev, status.st_ino] = status.st_size
    for thread in list_paths(process / "task"):  # threads may have descriptors of their own
        for path in list_paths(f"{thread}/fd"):
            with contextlib.suppress(OSError):
                status = Path(path).stat()
                if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                    sizes[status.st_dev, status.st_ino] = status.st_size
    return sizes.values()


def list_paths(directory: Path | str) -> list[str]:
    """Paths in a directory; none if it exists no more."""
    try:
        with os.scandir(directory) as entries:
            return [entry.path for entry in entries]
    except OSError:
        return []


def kill_process(process: subprocess.Popen[bytes]) -> None:
    """End the process and its group. It cannot leave the group or start other processes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
