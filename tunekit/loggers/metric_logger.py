"""Metrics of training steps: the terminal, `metrics.jsonl` and experiment trackers.

`metrics.jsonl` has one line per `log_every` steps. `loss`, `grad_norm` and `lr` are of this step. `num_tokens` and
`num_target_tokens` are running totals since step 0, over all ranks. Tokens per second, `step_time` and `data_time` are
means since the previous line; `step_time` excludes compilation, evaluation and saving. `data_time` and memory are the
maximum over ranks. Non-finite values are written as `null`, because JSON has no NaN. Step 0 is the model before
training; the last line describes the final checkpoint.
"""

import importlib
import json
import math
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from tunekit import devices
from tunekit.config.secrets import message_text
from tunekit.data.dataloader.batch import Batch
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.kernels.device_tensors import HostCopy, read_lag
from tunekit.loggers.metrics_file import COMPLETIONS, EPISODES, FILE, StepLog
from tunekit.loggers.observers import HIDES_PROGRESS, open_observers
from tunekit.loggers.progress import PRINT_INTERVAL

MAX_PROMPT, MAX_ANSWER = 80, 400  # characters that are printed


@dataclass(frozen=True)
class TensorBoardConfig:
    """Event files for `tensorboard --logdir`, in `log_dir` or in the run directory."""

    kind: ClassVar[str] = "tensorboard"
    log_dir: str | None = None  # Directory of the event files; null: in the run directory


@dataclass(frozen=True)
class WandBConfig:
    """Weights & Biases. The API key is from `wandb login` or WANDB_API_KEY; `offline` writes to the run directory."""

    kind: ClassVar[str] = "wandb"
    project: str = "tunekit"  # Project name
    name: str | None = None  # Run name; null: name of the run directory
    group: str | None = None  # Group of runs
    entity: str | None = None  # User or team; null: default of the API key
    offline: bool = False  # Write to the run directory, for a later `wandb sync`


@dataclass(frozen=True)
class MLflowConfig:
    """MLflow, at `tracking_uri`, else at MLFLOW_TRACKING_URI, else in the run directory."""

    kind: ClassVar[str] = "mlflow"
    experiment_name: str = "tunekit"  # Experiment name
    run_name: str | None = None  # Run name; null: name of the run directory
    tracking_uri: str | None = None  # Tracking server; null: MLFLOW_TRACKING_URI, or the run directory


@dataclass(frozen=True)
class TrackioConfig:
    """Trackio, in its local data directory (TRACKIO_DIR) or in the Hugging Face Space `space_id`."""

    kind: ClassVar[str] = "trackio"
    project: str = "tunekit"  # Project name
    name: str | None = None  # Run name; null: name of the run directory
    group: str | None = None  # Group of runs
    space_id: str | None = None  # Hugging Face Space; null: local data directory


@dataclass(frozen=True)
class CometConfig:
    """Comet. The API key is from `comet login` or COMET_API_KEY; `offline` writes to the run directory."""

    kind: ClassVar[str] = "comet"
    project: str = "tunekit"  # Project name
    name: str | None = None  # Run name; null: name of the run directory
    workspace: str | None = None  # Workspace; null: default of the API key
    offline: bool = False  # Write to the run directory, for a later upload


Tracker = TensorBoardConfig | WandBConfig | MLflowConfig | TrackioConfig | CometConfig


@dataclass
class ThroughputCounter:
    """Counts tokens and time since the last metric line, of step `last_step`. Saved in the training state."""

    num_tokens: int = 0  # since step 0, as are the target tokens
    num_target_tokens: int = 0
    last_step: int = 0
    tokens: int = 0
    target_tokens: int = 0
    data_time: float = 0.0
    seconds: float = 0.0
    compile_time: float = 0.0

    def reset(self, step: int) -> None:
        self.last_step, self.tokens, self.target_tokens = step, 0, 0
        self.data_time = self.seconds = self.compile_time = 0.0

    def add_tokens(self, num_tokens: int, num_target_tokens: int) -> None:
        """Count the tokens of one step, and the target tokens among them."""
        self.tokens += num_tokens
        self.target_tokens += num_target_tokens
        self.num_tokens += num_tokens
        self.num_target_tokens += num_target_tokens

    def state_dict(self) -> dict[str, float]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, float]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


class PendingLine(NamedTuple):
    """Metric line of a step, whose values may still be on the device."""

    step: int
    metrics: Mapping[str, Tensor | float]
    copy: HostCopy | None  # of the tensors in `metrics`
    stats: dict[str, float]
    seconds_left: float  # until the end of the run

    @property
    def values(self) -> dict[str, float]:
        """All values by name. Waits for the device."""
        copied = iter([] if self.copy is None else self.copy.read())
        pairs = self.metrics.items()
        return {name: next(copied) if isinstance(x, Tensor) else float(x) for name, x in pairs} | self.stats


class MetricLogger:
    """Writes a metric line every `log_every` steps, on the main process. Must be called on all ranks.

    On a GPU, a line is written one step later, so that the host does not wait for its values, or before anything
    else is written or saved.
    """

    def __init__(  # noqa: PLR0913
        self,
        folder: Path,
        dist: DistributedContext,
        num_steps: int,
        start: int = 0,
        resolved: Mapping | None = None,
        counter: ThroughputCounter | None = None,
        log_every: int = 1,
        report_to: Iterable[Tracker] = (),
    ) -> None:
        self.log_every, self.dist, self.num_steps, self.start = log_every, dist, num_steps, start
        self.counter = counter or ThroughputCounter(last_step=start)
        trackers = report_to if dist.is_main_process else ()
        self.trackers = [open_tracker(tracker, folder, start, resolved or {}) for tracker in trackers]
        self.observers = open_observers(start, num_steps) if dist.is_main_process else []
        self.hides_progress = HIDES_PROGRESS.get()
        self.file = StepLog(folder / FILE, start) if dist.is_main_process else None
        self.completions = StepLog(folder / COMPLETIONS, start) if dist.is_main_process else None
        self.episodes = StepLog(folder / EPISODES, start) if dist.is_main_process else None
        if self.file is not None:
            self.file.open()  # raises if it cannot be written
        self.terminal = TerminalLogger(num_steps, start, dist.is_main_process)
        self.clock, self.compiled = time.perf_counter(), compile_seconds()
        self.mean_step_time = 0.0  # seconds per step, smoothed
        self.lag = read_lag(dist.device)
        self.pending: deque[PendingLine] = deque()

    def __enter__(self) -> "MetricLogger":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            # A device cannot be read after it has failed, and may hang when a run was interrupted.
            if error is None or (isinstance(error, Exception) and not isinstance(error, RuntimeError)):
                self.flush()
        finally:
            self.close()

    def close(self) -> None:
        self.terminal.close()
        for tracker in (*self.trackers, *self.observers):
            tracker.close()
        for file in filter(None, (self.file, self.completions, self.episodes)):
            file.close()

    def log_step(self, step: int, batches: Sequence[Batch], data_time: float, **metrics: Tensor | float) -> None:
        """Count the tokens of a step, over all ranks, and log its metrics if a line is due.

        `batches` are the micro-batches of this rank; `data_time` the seconds that it waited for them.
        """
        num_tokens, num_target_tokens = self.dist.sum_each_count(
            sum(batch.num_tokens for batch in batches), sum(batch.num_target_tokens for batch in batches)
        )
        self.counter.add_tokens(num_tokens, num_target_tokens)
        self.counter.data_time += data_time
        if self.is_due(step):
            self.pending.append(self.begin_line(step, metrics))
            self.counter.reset(step)
        self.flush(step - self.lag)
        self.terminal.advance(step)

    def begin_line(self, step: int, metrics: Mapping[str, Tensor | float]) -> PendingLine:
        """Start the copy of all metrics to the host in one transfer, and collect the values that are on the host."""
        copy = copy_to_host(metrics.values())
        stats = self.throughput(step) | self.dist.loss_scaler.metrics()
        num_steps = max(1, step - self.counter.last_step)
        local = {"data_time": self.counter.data_time / num_steps} | memory_stats(self.dist.device)
        stats |= dict(zip(local, self.dist.max_over_ranks(*local.values()), strict=True))
        return PendingLine(step, dict(metrics), copy, stats, self.mean_step_time * (self.num_steps - step))

    def flush(self, last: float = math.inf) -> None:
        """Write pending lines of steps up to `last`."""
        while self.pending and self.pending[0].step <= last:
            line = self.pending.popleft()
            values = line.values
            self.write(line.step, values)
            if not self.hides_progress:
                self.terminal.show(line.step, values, line.seconds_left)

    def discard_after(self, step: int) -> None:
        """Discard pending lines of steps after `step`."""
        self.pending = deque(line for line in self.pending if line.step <= step)

    def is_due(self, step: int) -> bool:
        """Whether a metric line is written for a step."""
        return step % self.log_every == 0 or step == self.num_steps

    def rewind(self, step: int) -> None:
        """Delete the lines after `step`, when the run rolls back to it. The counter was restored with the state."""
        self.flush()
        for file in filter(None, (self.file, self.completions, self.episodes)):
            file.rewind(step)
        self.terminal.advance(step)
        self.clock, self.compiled = time.perf_counter(), compile_seconds()

    def log(self, step: int, **values) -> None:
        """Write a separate line for values that not every step has, such as `eval/loss`, and print it."""
        self.flush()
        numbers = PendingLine(step, values, copy_to_host(values.values()), {}, 0.0).values
        self.write(step, numbers)
        self.terminal.print_line(f"step {step}: " + ", ".join(f"{name} {value:.6g}" for name, value in numbers.items()))

    def log_eval(self, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Log the metrics of an evaluation as `eval/<name>`, and return them."""
        if not metrics:  # answers without checks
            return metrics
        names = sorted(metrics, key=lambda name: name != "loss")  # the loss first
        self.log(step, **{f"eval/{name}": metrics[name] for name in names})
        return metrics

    def log_completions(self, step: int, rows: Sequence[Mapping[str, Any]], num_to_print: int) -> None:
        """Write answers of the model, one line each, to `completions.jsonl` and trackers, and print the first ones."""
        self.flush()
        if self.completions is None:
            return
        self.completions.write(step, rows)
        for tracker in self.trackers:
            tracker.log_completions(step, rows)
        for row in rows[:num_to_print]:
            prompt, answer = (json.dumps(row[key], ensure_ascii=False) for key in ("prompt", "completion"))
            answer = answer if len(answer) <= MAX_ANSWER else f"{answer[:MAX_ANSWER]}..."
            prompt = prompt if len(prompt) <= MAX_PROMPT else f"...{prompt[-MAX_PROMPT:]}"  # the end has the question
            self.terminal.print_line(f"step {step}: {prompt} -> {answer}")

    def log_episodes(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write sampled episodes with their tokens, one line each, to `episodes.jsonl`, for `tune episodes`."""
        if self.episodes is not None:
            self.episodes.write(step, rows)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the time inside the block (evaluation, saving) from step_time. Compilation is still counted."""
        self.add_elapsed_time()
        yield
        compiled = compile_seconds()
        self.counter.compile_time += compiled - self.compiled
        self.clock, self.compiled = time.perf_counter(), compiled

    def add_elapsed_time(self) -> None:
        """Add the time since the last call to the counter."""
        now, compiled = time.perf_counter(), compile_seconds()
        compiling = compiled - self.compiled
        self.counter.seconds += now - self.clock - compiling
        self.counter.compile_time += compiling
        self.clock, self.compiled = now, compiled

    def throughput(self, step: int) -> dict[str, float]:
        """Token totals, rates and times since the last line."""
        self.add_elapsed_time()
        counter, seconds = self.counter, max(self.counter.seconds, 1e-9)
        step_time = seconds / (step - counter.last_step)
        self.mean_step_time = step_time if self.mean_step_time == 0 else 0.9 * self.mean_step_time + 0.1 * step_time
        values = {
            "num_tokens": counter.num_tokens,
            "num_target_tokens": counter.num_target_tokens,
            "tokens_per_second": counter.tokens / seconds,
            "target_tokens_per_second": counter.target_tokens / seconds,
            "step_time": step_time,
        }
        if counter.compile_time > 0:
            values["compile_time"] = counter.compile_time
            self.terminal.print_line(f"step {step}: compiled for {counter.compile_time:.1f} s")
        return values

    def write(self, step: int, values: dict[str, float]) -> None:
        if self.file is None:
            return
        self.file.write(step, [values])
        for tracker in self.trackers:
            tracker.log(step, values)
        start = time.perf_counter()
        for observer in self.observers:
            observer.log(step, values)
        self.clock += time.perf_counter() - start  # not part of the step time


class TerminalLogger:
    """Progress bar; without a terminal, a line every `PRINT_INTERVAL` seconds."""

    def __init__(self, num_steps: int, start: int, is_main: bool) -> None:
        self.num_steps, self.is_main = num_steps, is_main
        self.is_plain = not sys.stderr.isatty()
        self.pending_line, self.last_print, self.step = "", -math.inf, start
        bar_format = "{n_fmt}/{total_fmt} |{bar}| {desc}"
        columns, lines = (80, 24) if self.is_plain else os.get_terminal_size(sys.stderr.fileno())
        has_size, disable = columns > 0 and lines > 0, self.is_plain or not is_main
        # Some terminals report a size of 0, for which tqdm draws nothing.
        size = (None, None) if has_size else (columns or 80, 24)
        self.bar = tqdm(
            total=num_steps,
            initial=start,
            bar_format=bar_format,
            disable=disable,
            dynamic_ncols=has_size,
            ncols=size[0],
            nrows=size[1],
        )

    def advance(self, step: int) -> None:
        if step != self.step:
            self.bar.update(step - self.step)  # negative after a rollback
            self.step = step

    def show(self, step: int, values: dict[str, float], seconds_left: float) -> None:
        memory = f"{format_si(values.get('memory_allocated', 0.0))}B"
        if "memory_reserved" in values:
            memory += f" of {format_si(values['memory_reserved'])}B"
        reward = f"reward {values['reward']:.3f}, " if "reward" in values else ""
        text = (
            f"{reward}loss {values['loss']:.4f}, {format_si(values['target_tokens_per_second'])} target tok/s, "
            f"{memory}, {tqdm.format_interval(seconds_left)} left"
        )
        self.bar.set_description_str(text, refresh=False)
        self.advance(max(step, self.step))
        now = time.monotonic()
        self.pending_line = f"step {step}/{self.num_steps}: {text}"
        if self.is_plain and now - self.last_print >= PRINT_INTERVAL:
            self.last_print = now
            self.print_pending()

    def print_line(self, text: str) -> None:
        """Print a line above the progress bar."""
        if self.is_main:
            tqdm.write(message_text(text), file=sys.stderr)

    def print_pending(self) -> None:
        if self.pending_line:
            self.print_line(self.pending_line)
            self.pending_line = ""

    def close(self) -> None:
        if self.is_plain:
            self.print_pending()
        self.bar.close()


def open_tracker(tracker: Tracker, folder: Path, start: int, resolved: Mapping):
    """Open an experiment tracker and import its package. Raises UserError if that fails."""
    kind = tracker.kind  # the module, and the extra of the package
    try:
        module = importlib.import_module(f"tunekit.loggers.{kind}")
    except ImportError as error:
        missing = (error.name or kind).partition(".")[0]
        raise UserError(f"report_to: package {missing} is not installed. Run: pip install 'tunekit[{kind}]'") from error
    try:
        return module.Logger(tracker, folder, start, resolved)
    except module.OPEN_ERRORS as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"report_to: {kind} cannot be opened: {reason}") from error


def compile_seconds() -> float:
    """Total time of torch.compile so far, forward and backward. Its module is imported on first use."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0.0 if dynamo is None else dynamo.calculate_time_spent()["total_wall_time"]


def memory_stats(device: torch.device) -> dict[str, float]:
    """Current and peak memory in bytes: allocated and reserved on a GPU, resident set size on the CPU."""
    if (stats := devices.memory_stats(device)) is not None:
        return allocator_stats(stats)
    status = Path("/proc/self/status")
    if status.is_file():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        sizes = {"memory_allocated": "VmRSS", "peak_memory": "VmHWM"}
        return {name: int(fields[field].split()[0]) * 1024 for name, field in sizes.items()}
    return {"peak_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}  # macOS: in bytes


def allocator_stats(stats: Mapping[str, int]) -> dict[str, float]:
    """Statistics of torch's GPU allocator.

    Fragmentation is the unused fraction of the reserved memory. An allocation is retried when the GPU is out of memory:
    torch first frees all cached blocks, which is slow.
    """
    allocated, reserved = stats.get("allocated_bytes.all.current", 0), stats.get("reserved_bytes.all.current", 0)
    return {
        "memory_allocated": allocated,
        "peak_memory": stats.get("allocated_bytes.all.peak", 0),
        "memory_reserved": reserved,
        "peak_memory_reserved": stats.get("reserved_bytes.all.peak", 0),
        "memory_fragmentation": 1 - allocated / reserved if reserved else 0.0,
        "num_alloc_retries": stats.get("num_alloc_retries", 0),
    }


def copy_to_host(values: Iterable[Tensor | float]) -> HostCopy | None:
    """Start a copy of the tensors in `values` to the host, in one transfer; None if there are none."""
    tensors = [v.detach().to(devices.accumulation_dtype(v.device)) for v in values if isinstance(v, Tensor)]
    return HostCopy(torch.stack(tensors)) if tensors else None


def format_si(value: float) -> str:
    return tqdm.format_sizeof(value, divisor=1000)
