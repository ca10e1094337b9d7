"""Profiling of some steps of a run: a torch.profiler trace per rank, and a table of the step time."""

import gzip
import json
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch.profiler import profile, schedule

from tunekit import devices
from tunekit.config.errors import FieldErrors
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError, UserError
from tunekit.training.trace_analysis import StepTimeBreakdown, step_breakdown

DIRECTORY, TABLE = "profile", "table.md"
MAX_EVENTS = 200_000  # allocations in a CUDA memory snapshot
MIN_SHARE = 0.15  # of the step time: a smaller share is not worth a change
ADVICE = {
    "all-gather": "Use a larger `micro_batch_size` or `parallel.reshard_after_forward=false` if memory allows, else "
    "try `parallel.prefetch_layers=2`",
    "reduce-scatter": "Use a larger `micro_batch_size`, so that a step has fewer micro-batches",
    "all-to-all": "Use a smaller `parallel.ep`, or keep its ranks on one node",
    "all-reduce": "Use a smaller `parallel.tp`, or keep its ranks on one node; with DDP, use a larger "
    "`micro_batch_size`",
}


@dataclass(frozen=True)
class ProfilerConfig:
    """Profile some steps with torch.profiler. Traces and a table are written to `profile/` in the run directory."""

    kind: ClassVar[str] = "profiler"
    skip_first: int = 3  # Steps before profiling starts
    active: int = 3  # Steps to profile
    profile_memory: bool = False  # Also record a CUDA memory snapshot

    def __post_init__(self) -> None:
        values = {"skip_first": self.skip_first, "active": self.active}
        errors = [FieldError(name, f"must be >= 1, got {value}") for name, value in values.items() if value < 1]
        if errors:
            raise FieldErrors(errors)

    def check_num_steps(self, max_steps: int | None) -> None:
        """Raise FieldError if a run of `max_steps` steps ends before profiling starts."""
        if max_steps is not None and self.skip_first >= max_steps:
            raise FieldError(
                "profiler.skip_first",
                f"must be < max_steps, got {self.skip_first} with max_steps={max_steps}: no step would be profiled",
            )

    def check(self, device: torch.device) -> None:
        """Raise UserError if the device does not support an option."""
        if self.profile_memory and device.type != "cuda":
            raise UserError(f"profiler.profile_memory: requires a CUDA device, got {device.type}")


def resolve_profiler(choice: ProfilerConfig | bool) -> ProfilerConfig | None:
    """The config of `profiler`: `true` means the defaults, `false` none."""
    return ProfilerConfig() if choice is True else choice or None


class RankProfile(NamedTuple):
    """The profile of one rank."""

    breakdown: StepTimeBreakdown
    peak_memory: int  # bytes


class Profiler:
    """Profiles the configured steps, if any. All ranks call `begin_step` at the same steps.

    with Profiler(cfg.profiler, run_dir, dist) as profiler:
        for step in ...:
            profiler.begin_step(step)
    """

    def __init__(self, choice: ProfilerConfig | bool, run_dir: Path, dist: DistributedContext) -> None:
        self.config = resolve_profiler(choice)
        self.directory, self.dist = run_dir / DIRECTORY, dist
        self.num_steps, self.first_step = 0, 0  # steps of this process so far; the first one in the trace
        self.trace: profile | None = None
        self.is_written = False
        if self.config is not None:
            self.config.check(dist.device)

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.finish()
            if self.config is not None and not self.is_written:
                self.dist.log(
                    f"profiler: no step was profiled: profiler.skip_first={self.config.skip_first}, and this process "
                    f"ran {self.num_steps} steps"
                )
        elif self.trace is not None:  # other ranks may be inside a collective, so the profiles cannot be gathered
            trace, self.trace = self.trace, None
            trace.stop()

    def begin_step(self, step: int) -> None:
        """Start, continue or stop profiling at the beginning of a step."""
        if self.config is None:
            return
        if self.num_steps == self.config.skip_first - 1:
            self.start()
        elif self.trace is not None:
            self.trace.step()
        if self.num_steps == self.config.skip_first:
            self.first_step = step + 1
        self.num_steps += 1
        if self.num_steps > self.config.skip_first + self.config.active:
            self.finish()

    def start(self) -> None:
        """Start one step early: the profiler needs a warmup step."""
        assert self.config is not None
        if self.config.profile_memory:
            torch.cuda.memory._record_memory_history(max_entries=MAX_EVENTS)
        steps = schedule(wait=0, warmup=1, active=self.config.active, repeat=1)
        self.trace = profile(schedule=steps, on_trace_ready=self.write, record_shapes=True)
        self.trace.start()

    def write(self, trace: profile) -> None:
        """Write the trace of this rank."""
        assert self.config is not None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(self.file))
            if self.config.profile_memory:
                torch.cuda.memory._dump_snapshot(str(self.directory / f"memory-{self.dist.rank}.pickle"))
                torch.cuda.memory._record_memory_history(enabled=None)
        except OSError as error:
            raise UserError(f"{self.directory}: {error.strerror}. Free disk space, or set profiler=false.") from error
        self.is_written = True

    @property
    def file(self) -> Path:
        return self.directory / f"rank-{self.dist.rank}.json.gz"

    def finish(self) -> None:
        """Gather the profiles of all ranks, and write and log the table."""
        trace, self.trace = self.trace, None
        if trace is None:
            return
        trace.stop()
        profiles = self.dist.all_gather_objects(self.read_profile())
        if self.dist.is_main_process and self.is_written:
            text = format_table(profiles, self.first_step)
            (self.directory / TABLE).write_text(text, "utf-8")
            self.dist.log(f"{text}\ntraces for ui.perfetto.dev: {self.directory}")

    def read_profile(self) -> RankProfile:
        """The profile of this rank, from its trace file."""
        if not self.is_written:
            return RankProfile(step_breakdown([]), 0)
        with gzip.open(self.file, "rt", encoding="utf-8") as lines:
            return RankProfile(step_breakdown(json.load(lines)["traceEvents"]), peak_memory(self.dist.device))


def peak_memory(device: torch.device) -> int:
    """Peak bytes of this process: allocated tensors on a GPU, resident memory on a CPU."""
    if (peak := devices.peak_memory(device)) is not None:
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# The table


def format_table(profiles: Sequence[RankProfile], first_step: int) -> str:
    """Markdown: step time of each rank, collectives and operators of the slowest rank, and the bottleneck."""
    num_steps = min(rank.breakdown.steps for rank in profiles)
    if not num_steps:
        return "# No step was profiled\n"
    last_step = first_step + num_steps - 1
    title = f"# Steps {first_step} to {last_step}\n" if num_steps > 1 else f"# Step {first_step}\n"
    breakdowns = [rank.breakdown for rank in profiles]
    slowest = max(breakdowns, key=lambda rank: rank.compute + rank.optimizer + rank.data)
    lines = [title, find_bottleneck(breakdowns), "", "Seconds per step, and the share of the step:", ""]
    lines += [*format_ranks(profiles), ""]
    return "\n".join([*lines, *format_collectives(slowest), *format_ops(slowest)])


def format_ranks(profiles: Sequence[RankProfile]) -> list[str]:
    """One row per rank."""
    rows = ["| rank | step | compute | optimizer | exposed comm | data | other | hidden comm | memory |"]
    rows.append("|---" * 9 + "|")
    for number, (rank, memory) in enumerate(profiles):
        times = (rank.compute, rank.optimizer, rank.exposed, rank.data, rank.other)
        cells = [f"{seconds / rank.steps:.3f} ({seconds / rank.total:.0%})" for seconds in times]
        cells += [f"{rank.hidden / rank.steps:.3f}", f"{memory / 2**30:.2f} GiB"]
        rows.append(f"| {number} | {rank.total / rank.steps:.3f} | " + " | ".join(cells) + " |")
    return rows


def format_collectives(rank: StepTimeBreakdown) -> list[str]:
    """The collectives of one rank, per step."""
    if not rank.collectives:
        return []
    rows = ["| collective | calls per step | MB per step | seconds per step |", "|---|---|---|---|"]
    for stats in rank.collectives:
        size, seconds = stats.bytes / 1e6 / rank.steps, stats.seconds / rank.steps
        rows.append(f"| {stats.name} | {stats.calls / rank.steps:.4g} | {size:.4g} | {seconds:.4f} |")
    return [*rows, ""]


def format_ops(rank: StepTimeBreakdown) -> list[str]:
    """The slowest operators of one rank, per step."""
    rows = ["| operator | calls per step | seconds per step | share |", "|---|---|---|---|"]
    for stats in rank.ops:
        name, share = stats.name.replace("|", "/")[:80], stats.seconds / rank.total
        rows.append(f"| `{name}` | {stats.calls / rank.steps:.4g} | {stats.seconds / rank.steps:.4f} | {share:.1%} |")
    return [*rows, ""]


def find_bottleneck(ranks: Sequence[StepTimeBreakdown]) -> str:
    """The largest part of the step time that is not compute, over all ranks, and how to reduce it."""
    total = sum(rank.total for rank in ranks)
    shares = {
        "data": sum(rank.data for rank in ranks) / total,
        "exposed": sum(rank.exposed for rank in ranks) / total,
        "other": sum(rank.other for rank in ranks) / total,
    }
    worst = max(shares, key=lambda name: shares[name])
    share = f"{shares[worst]:.0%} of the step"
    if shares[worst] < MIN_SHARE:
        return f"Bottleneck: compute, {1 - sum(shares.values()):.0%} of the step. docs/memory.md has faster settings."
    if worst == "data":
        return f"Bottleneck: data loading, {share}. Preprocess the rows (`data.streaming=false`), or pack them."
    if worst == "exposed":
        return f"Bottleneck: exposed communication, {share}. {suggest_comm_settings(ranks)}."
    return (
        f"Bottleneck: time between operators, {share}. They are too small for the device: use a larger "
        "`micro_batch_size`, or try `compile=true`."
    )


def suggest_comm_settings(ranks: Sequence[StepTimeBreakdown]) -> str:
    """Advice on the slowest kind of collective, or on ranks that compute for different times."""
    busy = [rank.compute + rank.optimizer + rank.data for rank in ranks]
    if max(busy) - min(busy) > 0.5 * max(rank.exposed for rank in ranks):
        slow = busy.index(max(busy))
        return f"The other ranks wait for rank {slow}, whose rows are longer or device slower: try `data.packing=true`"
    seconds: dict[str, float] = {}
    for stats in (stats for rank in ranks for stats in rank.collectives if stats.name in ADVICE):
        seconds[stats.name] = seconds.get(stats.name, 0.0) + stats.seconds
    if not seconds:
        return "Use a larger `micro_batch_size`, so that there is more compute between two collectives"
    return ADVICE[max(seconds, key=lambda kind: seconds[kind])]
