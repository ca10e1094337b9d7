"""Some steps of a run under torch.profiler: a trace of every rank, and a table that says where their time went."""

import gzip
import json
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import ClassVar, NamedTuple

import torch
from torch.profiler import profile, schedule

from tunekit import devices
from tunekit.config.errors import FieldErrors
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError, UserError
from tunekit.training.trace_analysis import StepTimeBreakdown, step_breakdown

FOLDER, TABLE = "profile", "table.md"
EVENTS = 200_000  # allocations of a GPU that a snapshot tells of
MUCH = 0.15  # of a step: from there on it is worth a change
ADVICE = {
    "all-gather": "weights come late: as far as memory goes, take more rows at once (`micro_batch_size`) or keep "
    "what was "
    "gathered (`parallel.reshard_after_forward=false`); else try `parallel.prefetch_layers=2`",
    "reduce-scatter": "gradients are slow to add up: take more rows at once (`micro_batch_size`), so that a step "
    "has fewer "
    "passes",
    "all-to-all": "tokens travel to their experts: lower `parallel.ep`, or keep its ranks on one machine",
    "all-reduce": "sums are waited for: lower `parallel.tp` or keep its ranks on one machine; with copies, take "
    "more rows at once (`micro_batch_size`)",
}


@dataclass(frozen=True)
class ProfilerConfig:
    """Which steps are looked at. Everything goes into the folder of the run, under `profile`."""

    kind: ClassVar[str] = "profiler"
    skip_first: int = 3  # Steps before profiling starts
    active: int = 3  # Steps to profile
    profile_memory: bool = False  # Also record a CUDA memory snapshot

    def __post_init__(self) -> None:
        low = [name for name in ("skip_first", "active") if vars(self)[name] < 1]
        if low:
            raise FieldErrors([FieldError(name, f"must be 1 or more, not {vars(self)[name]}") for name in low])

    def check_num_steps(self, max_steps: int | None) -> None:
        """Raise FieldError if a run of `max_steps` steps ends before profiling starts."""
        if max_steps is not None and self.skip_first >= max_steps:
            raise FieldError(
                "profiler.skip_first",
                f"must be < max_steps, got {self.skip_first} with max_steps={max_steps}: no step would be profiled",
            )

    def check(self, device: torch.device) -> None:
        """Whether the device has what is asked for."""
        if self.profile_memory and device.type != "cuda":
            raise UserError(
                f"profiler.profile_memory: torch records the memory of CUDA devices only, got {device.type}"
            )


def resolve_profiler(choice: ProfilerConfig | bool) -> ProfilerConfig | None:
    """What `profile` comes to."""
    return ProfilerConfig() if choice is True else choice or None


class RankProfile(NamedTuple):
    """What came of it on one rank."""

    figures: StepTimeBreakdown
    memory: int  # bytes at most


class Profiler:
    """Looks at the steps that were chosen, if any were. All ranks call `at` at the same steps.

    with Profiler(choice, folder, run) as profiler:
        for step in ...:
            profiler.at(step)
    """

    def __init__(self, choice: ProfilerConfig | bool, folder: Path, run: DistributedContext) -> None:
        self.choice = resolve_profiler(choice)
        self.folder, self.run = folder / FOLDER, run
        self.begun, self.first = 0, 0
        self.trace: profile | None = None
        self.written = False
        if self.choice is not None:
            self.choice.check(run.device)

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.end()
            if self.choice is not None and not self.written:
                self.run.tell(
                    f"profiler: no step was profiled: profiler.skip_first={self.choice.skip_first} steps are skipped, "
                    f"and this start had {self.begun}"
                )
        elif self.trace is not None:  # others may be in the middle of an exchange: what was seen is not put together
            trace, self.trace = self.trace, None
            trace.stop()

    def at(self, step: int) -> None:
        """A step begins."""
        if self.choice is None:
            return
        if self.begun == self.choice.skip_first - 1:
            self.begin()
        elif self.trace is not None:
            self.trace.step()
        if self.begun == self.choice.skip_first:
            self.first = step + 1
        self.begun += 1
        if self.begun > self.choice.skip_first + self.choice.active:
            self.end()

    def begin(self) -> None:
        """One step before those that count: what looks warms up too."""
        assert self.choice is not None
        if self.choice.profile_memory:
            torch.cuda.memory._record_memory_history(max_entries=EVENTS)
        how = schedule(wait=0, warmup=1, active=self.choice.active, repeat=1)
        self.trace = profile(schedule=how, on_trace_ready=self.write, record_shapes=True)
        self.trace.start()

    def write(self, trace: profile) -> None:
        """The trace of this rank."""
        assert self.choice is not None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(self.file))
            if self.choice.profile_memory:
                torch.cuda.memory._dump_snapshot(str(self.folder / f"memory-{self.run.rank}.pickle"))
                torch.cuda.memory._record_memory_history(enabled=None)
        except OSError as error:
            raise UserError(
                f"cannot write {self.folder}: {error.strerror}: make room, or leave `profiler` out"
            ) from error
        self.written = True

    @property
    def file(self) -> Path:
        return self.folder / f"rank-{self.run.rank}.json.gz"

    def end(self) -> None:
        """Put together what all ranks have seen."""
        trace, self.trace = self.trace, None
        if trace is None:
            return
        trace.stop()
        seen = self.run.gather(self.seen())
        if self.run.is_main and self.written:
            text = table(seen, self.first)
            (self.folder / TABLE).write_text(text, "utf-8")
            self.run.tell(f"{text}\ntraces for ui.perfetto.dev: {self.folder}")

    def seen(self) -> RankProfile:
        """What the trace of this rank says."""
        if not self.written:
            return RankProfile(step_breakdown([]), 0)
        with gzip.open(self.file, "rt", encoding="utf-8") as lines:
            return RankProfile(step_breakdown(json.load(lines)["traceEvents"]), peak(self.run.device))


def peak(device: torch.device) -> int:
    """Bytes that this process had at most: in tensors on a GPU, resident on a CPU."""
    if (bytes := devices.peak_memory(device)) is not None:
        return bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# What is said of it


def table(seen: Sequence[RankProfile], first: int) -> str:
    """For people: where the time went on each rank, what was sent, what took longest, and what to change."""
    steps = min(one.figures.steps for one in seen)
    if not steps:
        return "# No step was profiled\n"
    behind = f"steps {first} to {first + steps - 1}" if steps > 1 else f"step {first}"
    slowest = max((one.figures for one in seen), key=lambda one: one.compute + one.optimizer + one.data)
    parts = [f"# {behind.capitalize()}\n", verdict([one.figures for one in seen]), ""]
    parts += ["Seconds a step, and the share of it:", "", *ranks(seen), ""]
    return "\n".join([*parts, *exchanges(slowest), *operations(slowest)])


def ranks(seen: Sequence[RankProfile]) -> list[str]:
    """A line for each."""
    names = ("compute", "optimizer", "exposed", "data", "other")
    rows = ["| rank | step | compute | optimizer | exposed exchanges | data | other | hidden exchanges | memory |"]
    rows.append("|---" * 9 + "|")
    for rank, (one, memory) in enumerate(seen):
        cells = [f"{vars(one)[name] / one.steps:.3f} ({vars(one)[name] / one.total:.0%})" for name in names]
        cells += [f"{one.hidden / one.steps:.3f}", f"{memory / 2**30:.2f} GiB"]
        rows.append(f"| {rank} | {one.total / one.steps:.3f} | " + " | ".join(cells) + " |")
    return rows


def exchanges(one: StepTimeBreakdown) -> list[str]:
    """What one rank took part in, in a step."""
    if not one.exchanges:
        return []
    rows = ["| exchange | calls a step | MB a step | seconds a step |", "|---|---|---|---|"]
    for each in one.exchanges:
        size, seconds = each.bytes / 1e6 / one.steps, each.seconds / one.steps
        rows.append(f"| {each.kind} | {each.calls / one.steps:.4g} | {size:.4g} | {seconds:.4f} |")
    return [*rows, ""]


def operations(one: StepTimeBreakdown) -> list[str]:
    """The largest of one rank, in a step."""
    rows = ["| operation | calls a step | seconds a step | share |", "|---|---|---|---|"]
    for each in one.operations:
        name, share = each.name.replace("|", "/")[:80], each.seconds / one.total
        rows.append(f"| `{name}` | {each.calls / one.steps:.4g} | {each.seconds / one.steps:.4f} | {share:.1%} |")
    return [*rows, ""]


def verdict(seen: Sequence[StepTimeBreakdown]) -> str:
    """What the steps wait for most, on all ranks together, and what to change."""
    total = sum(one.total for one in seen)
    shares = {name: sum(vars(one)[name] for one in seen) / total for name in ("data", "exposed", "other")}
    worst = max(shares, key=lambda name: shares[name])
    share = f"{shares[worst]:.0%} of a step"
    if shares[worst] < MUCH:
        busy = 1 - sum(shares.values())
        return (
            f"Bottleneck: compute, {busy:.0%} of a step. Little is lost; see docs/memory.md for what makes it cheaper."
        )
    if worst == "data":
        return (
            f"Bottleneck: data, {share}. Rows are made too slowly: prepare them (`data.streaming=false`), or pack them."
        )
    if worst == "exposed":
        return f"Bottleneck: exposed exchanges, {share}. {advice(seen)}."
    return (
        f"Bottleneck: the time between operations, {share}. They are too small for the device: take more rows at once "
        "(`micro_batch_size`), or try `compile=true`."
    )


def advice(seen: Sequence[StepTimeBreakdown]) -> str:
    """About the kind of exchange that took longest; where ranks compute unlike long, about that."""
    busy = [one.compute + one.optimizer + one.data for one in seen]
    if max(busy) - min(busy) > 0.5 * max(one.exposed for one in seen):
        slow = busy.index(max(busy))
        return f"The others wait for rank {slow}: rows of unlike length, or a slower device; try `data.packing=true`"
    kinds = [each.kind for one in seen for each in one.exchanges if each.kind in ADVICE]
    if not kinds:
        return "Let more be computed between two of them"
    sums = {kind: sum(e.seconds for one in seen for e in one.exchanges if e.kind == kind) for kind in kinds}
    words = ADVICE[max(sums, key=lambda kind: sums[kind])]
    return words[0].upper() + words[1:]
