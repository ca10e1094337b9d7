"""Heartbeats of the ranks of this node, read by their launcher, and reports of hangs.

Does not import torch. Heartbeats are written to anonymous shared memory (memfd), which leaves no files.
"""

import mmap
import os
import re
import struct
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from tunekit.distributed import worker_env
from tunekit.errors import RunStopped, UserError, describe_user_code_error, find_user_code

HEARTBEAT_STRUCT = struct.Struct("<qd32s")  # step, time, phase
FAILURE_STRUCT = struct.Struct("<d960s")  # time of the failure (0: none), reason
SLOT_BYTES = 1024  # of each rank
# Phases with long times between heartbeats; "": before the first heartbeat.
SLOW_PHASES = frozenset({"", "compile", "prepare", "load", "validate", "save", "finish"})
SLOW_PHASE_FACTOR = 10  # factor of the timeout for slow phases
STACK_TIMEOUT_SECONDS = 5.0  # seconds to wait for the stack of a rank
FRAME_PATTERN = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')


@dataclass(frozen=True)
class Heartbeat:
    """Last step and phase of a rank. Times are values of time.monotonic()."""

    step: int
    time: float
    phase: str
    failure_time: float
    reason: str

    @classmethod
    def read(cls, memory: mmap.mmap, slot: int) -> "Heartbeat":
        step, heartbeat_time, phase = HEARTBEAT_STRUCT.unpack_from(memory, slot * SLOT_BYTES)
        failure_time, reason = FAILURE_STRUCT.unpack_from(memory, slot * SLOT_BYTES + HEARTBEAT_STRUCT.size)
        return cls(step, heartbeat_time, decode_text(phase), failure_time, decode_text(reason))


class HeartbeatWriter:
    """Writes the heartbeats of this rank. Without a launcher, they are written to a private buffer."""

    def __init__(self, memory: mmap.mmap | bytearray, slot: int = 0) -> None:
        self.memory, self.start = memory, slot * SLOT_BYTES

    @classmethod
    def open(cls) -> "HeartbeatWriter":
        value = os.environ.get(worker_env.HEARTBEAT)
        if value is None:
            return cls(bytearray(SLOT_BYTES))
        file, slot = map(int, value.split(":"))
        return cls(mmap.mmap(file, 0), slot)

    def record(self, step: int, phase: str) -> None:
        """Record progress in a phase (load, prepare, step, save, ...) of a step."""
        HEARTBEAT_STRUCT.pack_into(self.memory, self.start, step, time.monotonic(), phase.encode())

    def __enter__(self) -> "HeartbeatWriter":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Record the exception that ends this rank, for the launcher to find the rank that failed first.

        Tracebacks of workers are written to their logs. The launcher prints the log of the first failed rank only.
        """
        if error is None or isinstance(error, RunStopped):
            return
        reason = describe_user_code_error(error).encode(errors="replace")
        FAILURE_STRUCT.pack_into(self.memory, self.start + HEARTBEAT_STRUCT.size, time.monotonic(), reason)
        has_stack = isinstance(error, Exception) or find_user_code(error) is not None
        if worker_env.is_tune_worker() and has_stack and not isinstance(error, UserError):
            stack = "".join(traceback.format_exception(error))
            os.write(int(os.environ[worker_env.LOG]), stack.encode(errors="replace"))
            raise SystemExit(1)


def decode_text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")


class HeartbeatMonitor:
    """Shared memory for the heartbeats of all ranks of one start, and one for the stack of each rank."""

    def __init__(self, count: int) -> None:
        self.file = os.memfd_create("heartbeats")
        os.truncate(self.file, count * SLOT_BYTES)
        self.memory = mmap.mmap(self.file, count * SLOT_BYTES)
        self.stacks = [os.memfd_create("stacks") for _ in range(count)]
        self.start_time = time.monotonic()

    @property
    def files(self) -> tuple[int, ...]:
        """File descriptors that ranks inherit."""
        return self.file, *self.stacks

    def environment(self, slot: int) -> dict[str, str]:
        return {worker_env.HEARTBEAT: f"{self.file}:{slot}", worker_env.STACKS: str(self.stacks[slot])}

    def read_all(self) -> list[Heartbeat]:
        return [Heartbeat.read(self.memory, slot) for slot in range(len(self.stacks))]

    def is_stalled(self, limit: float) -> bool:
        """Whether no rank has sent a heartbeat for `limit` seconds, or ten times as long in slow phases."""
        heartbeats = self.read_all()
        factor = SLOW_PHASE_FACTOR if any(heartbeat.phase in SLOW_PHASES for heartbeat in heartbeats) else 1
        last = max(self.start_time, *(heartbeat.time for heartbeat in heartbeats))
        return time.monotonic() - last > limit * factor

    def dump_stacks(self, pids: list[int]) -> list[str]:
        """Python stacks of all ranks, including those blocked in C code; empty for ranks that do not answer."""
        for pid in pids:
            os.kill(pid, worker_env.STACKS_SIGNAL)
        deadline = time.monotonic() + STACK_TIMEOUT_SECONDS
        previous_sizes = None
        while time.monotonic() < deadline:
            time.sleep(0.2)
            sizes = [os.fstat(file).st_size for file in self.stacks]
            if all(sizes) and sizes == previous_sizes:
                break
            previous_sizes = sizes
        return [os.pread(file, 1 << 20, 0).decode(errors="replace") for file in self.stacks]

    def close(self) -> None:
        self.memory.close()
        for file in self.files:
            os.close(file)


@dataclass(frozen=True)
class StackFrame:
    """One frame of a Python stack."""

    file: str
    line: int
    name: str

    @property
    def is_torch(self) -> bool:
        return "/torch/" in self.file

    def __str__(self) -> str:
        return f"{self.name} ({'/'.join(Path(self.file).parts[-2:])}:{self.line})"


@dataclass(frozen=True)
class RankStatus:
    """Position of a rank: its collective, if it waits in one, and its innermost frame outside of torch."""

    rank: int
    heartbeat: Heartbeat
    collective: str | None
    frame: StackFrame | None

    @property
    def is_waiting(self) -> bool:
        return self.collective is not None

    def __str__(self) -> str:
        message = f"rank {self.rank}: step {self.heartbeat.step}, {self.heartbeat.phase or 'starting'}; "
        if self.frame is None:
            return message + "does not answer: stopped, or blocked in a system call"
        return message + (f"waits in {self.collective}, from {self.frame}" if self.is_waiting else f"in {self.frame}")


def parse_threads(stack: str) -> list[list[StackFrame]]:
    """Frames of each thread, innermost first. The main thread is last."""
    threads = []
    for section in re.split(r"^(?:Current thread|Thread) .*$", stack, flags=re.MULTILINE)[1:]:
        frames = [StackFrame(m["file"], int(m["line"]), m["name"]) for m in FRAME_PATTERN.finditer(section)]
        threads += [frames] if frames else []
    return threads


def rank_status(rank: int, heartbeat: Heartbeat, stack: str) -> RankStatus:
    """Status of a rank, from its stack. Collectives of a backward pass may run in a thread other than the main one."""
    for frames in parse_threads(stack):
        index = next((i for i, frame in enumerate(frames) if not frame.is_torch), len(frames) - 1)
        names = [frame.name for frame in frames[:index] if "/torch/distributed/" in frame.file]
        if names:
            return RankStatus(rank, heartbeat, names[0], frames[index])
    main_thread = parse_threads(stack)[-1:]
    return RankStatus(rank, heartbeat, None, main_thread[0][0] if main_thread else None)


def find_stalled_rank(statuses: list[RankStatus], timeout: float) -> str:
    """Report with the position of each rank, and with the ranks that the others wait for."""
    running = [status for status in statuses if not status.is_waiting]
    lines = [f"no rank has made progress for {timeout:g} s:", *(f"  {status}" for status in statuses)]
    if len(running) == len(statuses):
        lines.append("no rank waits for another rank")
    elif running:
        lines.append(f"the others wait for {' and '.join(f'rank {status.rank}' for status in running)}")
    elif len({status.collective for status in statuses}) > 1:
        lines.append("they wait for each other in different collectives")
    else:
        lines.append(f"all wait in {statuses[0].collective}: for a rank of another node, or for the network")
    return "\n".join(lines)
