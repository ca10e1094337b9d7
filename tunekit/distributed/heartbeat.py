"""Whether the ranks of this machine go on: each tells where it is, and the process that started them reads it.

Nothing here imports torch. What ranks tell lies in memory that belongs to no file (memfd), so nothing is left behind.
"""

import mmap
import os
import re
import struct
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tunekit.distributed import worker_env
from tunekit.errors import RunStopped, UserError

BEAT = struct.Struct("<qd32s")  # step, when it was told, phase
FAILURE = struct.Struct("<d960s")  # when the rank failed (0: it did not), of what
WIDTH = 1024  # bytes for each rank
# Phases in which nothing is told for long; "": the first is to come.
LONG = frozenset({"", "compile", "prepare", "load", "validate", "save", "finish"})
PATIENCE = 10  # times the limit that they have
ANSWER = 5.0  # seconds in which a rank has to say where it stands
FRAME = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')


@dataclass(frozen=True)
class Heartbeat:
    """Where a rank was, and when (in seconds of the machine's clock that never goes back)."""

    step: int
    at: float
    phase: str
    failed: float
    reason: str

    @classmethod
    def read(cls, memory: mmap.mmap, slot: int) -> "Heartbeat":
        step, at, phase = BEAT.unpack_from(memory, slot * WIDTH)
        failed, reason = FAILURE.unpack_from(memory, slot * WIDTH + BEAT.size)
        return cls(step, at, text(phase), failed, text(reason))


class HeartbeatWriter:
    """What this rank tells of itself. Where nobody has started it as one of several, nobody reads it."""

    def __init__(self, memory: mmap.mmap | bytearray, slot: int = 0) -> None:
        self.memory, self.start = memory, slot * WIDTH

    @classmethod
    def open(cls) -> "HeartbeatWriter":
        word = os.environ.get(worker_env.BEATS)
        if word is None:
            return cls(bytearray(WIDTH))
        file, slot = map(int, word.split(":"))
        return cls(mmap.mmap(file, 0), slot)

    def beat(self, step: int, phase: str) -> None:
        """This rank goes on: it begins a phase (load, prepare, step, save, ..) of a step, or is further in one."""
        BEAT.pack_into(self.memory, self.start, step, time.monotonic(), phase.encode())

    def __enter__(self) -> "HeartbeatWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """This rank ends by a mistake or an error: the first of several to say so is the one to blame.

        Of an error the traceback goes to the log; who has started us shows that of the first one alone.
        """
        if error is None or isinstance(error, RunStopped):
            return
        reason = f"{type(error).__name__}: {error}".encode(errors="replace")
        FAILURE.pack_into(self.memory, self.start + BEAT.size, time.monotonic(), reason)
        if worker_env.is_tune_worker() and isinstance(error, Exception) and not isinstance(error, UserError):
            os.write(
                int(os.environ[worker_env.LOG]), "".join(traceback.format_exception(error)).encode(errors="replace")
            )
            raise SystemExit(1)


def text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")


class HeartbeatMonitor:
    """The memory into which the ranks of one start write, and another one for the stack of each."""

    def __init__(self, count: int) -> None:
        self.file = os.memfd_create("beats")
        os.truncate(self.file, count * WIDTH)
        self.memory = mmap.mmap(self.file, count * WIDTH)
        self.stacks = [os.memfd_create("stacks") for _ in range(count)]
        self.began = time.monotonic()

    @property
    def files(self) -> tuple[int, ...]:
        """What ranks inherit."""
        return self.file, *self.stacks

    def environment(self, slot: int) -> dict[str, str]:
        return {worker_env.BEATS: f"{self.file}:{slot}", worker_env.STACKS: str(self.stacks[slot])}

    def beats(self) -> list[Heartbeat]:
        return [Heartbeat.read(self.memory, slot) for slot in range(len(self.stacks))]

    def silent(self, limit: float) -> bool:
        """Whether no rank has gone on for so many seconds."""
        beats = self.beats()
        patience = PATIENCE if any(beat.phase in LONG for beat in beats) else 1
        last = max(self.began, *(beat.at for beat in beats))
        return time.monotonic() - last > limit * patience

    def ask(self, pids: list[int]) -> list[str]:
        """The Python stacks of all ranks, also of those that are blocked in C; empty from one that does not answer."""
        for pid in pids:
            os.kill(pid, worker_env.STACKS_SIGNAL)
        late = time.monotonic() + ANSWER
        before = None
        while time.monotonic() < late:
            time.sleep(0.2)
            sizes = [os.fstat(file).st_size for file in self.stacks]
            if all(sizes) and sizes == before:
                break
            before = sizes
        return [os.pread(file, 1 << 20, 0).decode(errors="replace") for file in self.stacks]

    def close(self) -> None:
        self.memory.close()
        for file in self.files:
            os.close(file)


@dataclass(frozen=True)
class StackFrame:
    """One line of a stack."""

    file: str
    line: int
    name: str

    @property
    def torchs(self) -> bool:
        return "/torch/" in self.file

    def __str__(self) -> str:
        return f"{self.name} ({'/'.join(Path(self.file).parts[-2:])}:{self.line})"


@dataclass(frozen=True)
class RankStatus:
    """Where a rank stands: in which exchange with other ranks (none: the others may wait for it), and whose code."""

    rank: int
    beat: Heartbeat
    exchange: str | None
    frame: StackFrame | None

    @property
    def waits(self) -> bool:
        return self.exchange is not None

    def __str__(self) -> str:
        told = f"rank {self.rank}: step {self.beat.step}, {self.beat.phase or 'starting'}; "
        if self.frame is None:
            return told + "does not answer: stopped, or blocked in the system"
        return told + (f"waits in {self.exchange}, from {self.frame}" if self.waits else f"in {self.frame}")


def threads(stack: str) -> list[list[StackFrame]]:
    """The frames of every thread, the innermost first. The main thread is the last."""
    found = []
    for text in re.split(r"^(?:Current thread|Thread) .*$", stack, flags=re.MULTILINE)[1:]:
        frames = [StackFrame(m["file"], int(m["line"]), m["name"]) for m in FRAME.finditer(text)]
        found += [frames] if frames else []
    return found


def rank_status(rank: int, beat: Heartbeat, stack: str) -> RankStatus:
    """What the stack of a rank tells. A backward pass may exchange in another thread than the main one."""
    for frames in threads(stack):
        own = next((i for i, frame in enumerate(frames) if not frame.torchs), len(frames) - 1)
        names = [frame.name for frame in frames[:own] if "/torch/distributed/" in frame.file]
        if names:
            return RankStatus(rank, beat, names[0], frames[own])
    main = threads(stack)[-1:]
    return RankStatus(rank, beat, None, main[0][0] if main else None)


def find_stalled_rank(places: list[RankStatus], limit: float) -> str:
    """Which rank is where, and for which the others wait."""
    out = [place for place in places if not place.waits]
    lines = [f"no rank has gone on for {limit:g} s:", *(f"  {place}" for place in places)]
    if len(out) == len(places):
        lines.append("no rank waits for another one")
    elif out:
        lines.append(f"the others wait for {' and '.join(f'rank {place.rank}' for place in out)}")
    elif len({place.exchange for place in places}) > 1:
        lines.append("they wait for each other in different exchanges")
    else:
        lines.append(f"all wait in {places[0].exchange}: for a rank of another machine, or for what is between them")
    return "\n".join(lines)
