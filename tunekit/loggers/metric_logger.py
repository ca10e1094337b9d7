"""Metrics of training steps: the terminal, `metrics.jsonl` and experiment trackers.

`metrics.jsonl` has one line per `log_every` steps. `loss`, `grad_norm` and `lr` are of this step. `num_tokens` and
`num_target_tokens` are running totals since step 0, over all ranks. Tokens per second, `step_time` and `data_time` are
means since the previous line; `step_time` excludes compilation, evaluation and saving. `data_time` and memory are the
maximum over ranks. Values that are not finite are written as `null`, because JSON has no NaN. Step 0 is the model
before training; the last line describes the checkpoint that was written.
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
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from tunekit import devices
from tunekit.data.dataloader.batch import Batch
from tunekit.errors import UserError
from tunekit.kernels.device_to_host import HostCopy, read_lag

FILE = "metrics.jsonl"
PLAIN_SECONDS = 10.0


@dataclass(frozen=True)
class TensorBoardConfig:
    """Event files for `tensorboard --logdir`, inside the run's folder unless `log_dir` says where."""

    kind: ClassVar[str] = "tensorboard"
    log_dir: str | None = None


@dataclass(frozen=True)
class WandBConfig:
    """Weights & Biases. The token comes from `wandb login` or WANDB_API_KEY; `offline` writes into the run's folder."""

    kind: ClassVar[str] = "wandb"
    project: str = "tunekit"
    name: str | None = None
    group: str | None = None
    entity: str | None = None
    offline: bool = False


@dataclass(frozen=True)
class MLflowConfig:
    """MLflow, at `uri`, else at MLFLOW_TRACKING_URI, else in the run's folder."""

    kind: ClassVar[str] = "mlflow"
    experiment_name: str = "tunekit"
    run_name: str | None = None
    tracking_uri: str | None = None


@dataclass(frozen=True)
class TrackioConfig:
    """trackio, where it keeps its data (TRACKIO_DIR), or in the Hugging Face Space `space`."""

    kind: ClassVar[str] = "trackio"
    project: str = "tunekit"
    name: str | None = None
    group: str | None = None
    space_id: str | None = None


@dataclass(frozen=True)
class CometConfig:
    """Comet. The token comes from `comet login` or COMET_API_KEY; `offline` writes into the run's folder."""

    kind: ClassVar[str] = "comet"
    project: str = "tunekit"
    name: str | None = None
    workspace: str | None = None
    offline: bool = False


Tracker = TensorBoardConfig | WandBConfig | MLflowConfig | TrackioConfig | CometConfig
# The module of each service, which is also the name of its extra.
MODULES = {
    TensorBoardConfig: "tensorboard",
    WandBConfig: "wandb",
    MLflowConfig: "mlflow",
    TrackioConfig: "trackio",
    CometConfig: "comet",
}


class ThroughputCounter:
    """What came together since the last line, behind step `last`. A run that goes on from a state has it from there."""

    def __init__(self, last: int = 0) -> None:
        self.num_tokens = self.num_target_tokens = 0  # since step 0
        self.zero(last)

    def zero(self, last: int) -> None:
        self.last, self.tokens, self.learnt = last, 0, 0
        self.wait = self.seconds = self.compiling = 0.0

    def add_tokens(self, tokens: int, targets: int) -> None:
        """Count the tokens of one step, and the target tokens among them."""
        self.tokens, self.learnt = self.tokens + tokens, self.learnt + targets
        self.num_tokens, self.num_target_tokens = self.num_tokens + tokens, self.num_target_tokens + targets

    def state_dict(self) -> dict[str, float]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, float]) -> None:
        vars(self).update(state)


class Line(NamedTuple):
    """What one step is to write, of which the host may not know all numbers yet."""

    step: int
    made: Mapping[str, Tensor | float]
    copy: HostCopy | None  # of the tensors among these
    known: dict[str, float]
    left: float  # seconds of the run

    @property
    def values(self) -> dict[str, float]:
        """All numbers, for which the device is waited for."""
        read = iter([] if self.copy is None else self.copy.read())
        made = {name: next(read) if isinstance(value, Tensor) else float(value) for name, value in self.made.items()}
        return made | self.known


class MetricLogger:
    """Counts on every step, and has the numbers of one in `every` copied to the host. Only the main process speaks.

    On a GPU a line is written one step later, when the host need not wait for its numbers, or before anything else is
    written or saved.
    """

    def __init__(  # noqa: PLR0913
        self,
        folder: Path,
        run,
        total: int,
        start: int = 0,
        resolved: Mapping | None = None,
        sums: ThroughputCounter | None = None,
        log_every: int = 1,
        report_to: Iterable[Tracker] = (),
    ) -> None:
        self.log_every, self.run, self.total, self.start = log_every, run, total, start
        self.sums = sums or ThroughputCounter(start)
        self.services = [open_service(s, folder, start, resolved or {}) for s in report_to] if run.is_main else []
        self.file = open_metrics_file(folder / FILE, start) if run.is_main else None
        self.screen = TerminalLogger(total, start, run.is_main)
        self.clock, self.compiled = time.perf_counter(), compile_seconds()
        self.spent = 0.0  # seconds per step, smoothed
        self.lag = read_lag(run.device)
        self.pending: deque[Line] = deque()

    def __enter__(self) -> "MetricLogger":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            # Neither a device that has failed nor one of an interrupted run, which may hang, can be read.
            if error is None or (isinstance(error, Exception) and not isinstance(error, RuntimeError)):
                self.flush()
        finally:
            self.close()

    def close(self) -> None:
        self.screen.close()
        for service in self.services:
            service.close()
        if self.file is not None:
            self.file.close()

    def log_step(self, step: int, batches: Sequence[Batch], data_time: float, **metrics: Tensor | float) -> None:
        """Count the tokens of a step, over all ranks, and log its metrics if a line is due.

        `batches` are the micro-batches of this rank; `data_time` the seconds that it waited for them.
        """
        num_tokens, num_target_tokens = self.run.totals(
            sum(batch.real for batch in batches), sum(batch.learnt for batch in batches)
        )
        self.sums.add_tokens(num_tokens, num_target_tokens)
        self.sums.wait += data_time
        if self.reads(step):
            self.pending.append(self.begin_line(step, metrics))
            self.sums.zero(step)
        self.flush(step - self.lag)
        self.screen.advance(step)

    def begin_line(self, step: int, made: Mapping[str, Tensor | float]) -> Line:
        """What is known of a step, with its numbers on their way from the device, all in one transfer."""
        copy = copy_to_host(made.values())
        known = self.flow(step)
        num_steps = max(1, step - self.sums.last)
        here = {"data_time": self.sums.wait / num_steps} | memory_stats(self.run.device)
        known |= dict(zip(here, self.run.most(*here.values()), strict=True))
        return Line(step, dict(made), copy, known, self.spent * (self.total - step))

    def flush(self, last: float = math.inf) -> None:
        """Write what is not written yet of steps up to `last`."""
        while self.pending and self.pending[0].step <= last:
            line = self.pending.popleft()
            values = line.values
            self.write(line.step, values)
            self.screen.show(line.step, values, line.left)

    def drop(self, after: int) -> None:
        """Forget what is not written yet of later steps."""
        self.pending = deque(line for line in self.pending if line.step <= after)

    def reads(self, step: int) -> bool:
        """Whether a line is written about a step, for which its numbers are read from the device."""
        return step % self.log_every == 0 or step == self.total

    def back(self, step: int) -> None:
        """The run goes on from an earlier step: lines behind it come again. Its sums are there already."""
        self.flush()
        if self.file is not None:
            os.truncate(self.file.name, bytes_up_to_step(Path(self.file.name), step))
        self.screen.advance(step)
        self.clock, self.compiled = time.perf_counter(), compile_seconds()

    def note(self, step: int, **values) -> None:
        """Numbers that not every step has, such as the validation loss: a line of their own, above the bar."""
        self.flush()
        found = Line(step, values, copy_to_host(values.values()), {}, 0.0).values
        self.write(step, found)
        self.screen.tell(f"step {step}: " + ", ".join(f"{name} {value:.6g}" for name, value in found.items()))

    def log_eval(self, step: int, metrics: Mapping[str, float]) -> float:
        """Log the metrics of an evaluation as `eval/<name>`, and return its loss."""
        others = {f"eval/{name}": value for name, value in metrics.items() if name != "loss"}
        self.note(step, **{"eval/loss": metrics["loss"]}, **others)
        return metrics["loss"]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What happens inside (validation, saving) is no part of a step's time, but compiling is told with the step."""
        self.count()
        yield
        compiled = compile_seconds()
        self.sums.compiling += compiled - self.compiled
        self.clock, self.compiled = time.perf_counter(), compiled

    def count(self) -> None:
        """Add the time since it was last counted."""
        now, compiled = time.perf_counter(), compile_seconds()
        compiling = compiled - self.compiled
        self.sums.seconds += now - self.clock - compiling
        self.sums.compiling += compiling
        self.clock, self.compiled = now, compiled

    def flow(self, step: int) -> dict[str, float]:
        """Sums since the last line, and what they come to in a second."""
        self.count()
        tokens, learnt, seconds = self.sums.tokens, self.sums.learnt, max(self.sums.seconds, 1e-9)
        each = seconds / (step - self.sums.last)
        self.spent = each if self.spent == 0 else 0.9 * self.spent + 0.1 * each
        values = {"num_tokens": self.sums.num_tokens, "num_target_tokens": self.sums.num_target_tokens}
        values |= {
            "tokens_per_second": tokens / seconds,
            "target_tokens_per_second": learnt / seconds,
            "step_time": each,
        }
        if self.sums.compiling > 0:
            values["compile_time"] = self.sums.compiling
            self.screen.tell(f"step {step}: compiled for {self.sums.compiling:.1f} s")
        return values

    def write(self, step: int, values: dict[str, float]) -> None:
        if self.file is None:
            return
        line = encode_line(step, values)
        try:
            written = self.file.write(line)
        except OSError as error:
            raise UserError(f"cannot write {self.file.name}: {error.strerror}: make room and start again") from error
        if written != len(line):
            raise UserError(f"cannot write {self.file.name}: the disk is full: make room and start again")
        for service in self.services:
            service.log(step, values)


class TerminalLogger:
    """One line of the terminal that stays in place; where there is no terminal, a line now and then."""

    def __init__(self, total: int, start: int, speaks: bool) -> None:
        self.total, self.speaks = total, speaks
        self.plain = not sys.stderr.isatty()
        self.text, self.told, self.done = "", -math.inf, start
        form = "{n_fmt}/{total_fmt} |{bar}| {desc}"
        columns, lines = (80, 24) if self.plain else os.get_terminal_size(sys.stderr.fileno())
        known, quiet = columns > 0 and lines > 0, self.plain or not speaks
        # Some terminals do not know how large they are: tqdm would draw nothing.
        size = (None, None) if known else (columns or 80, 24)
        self.bar = tqdm(
            total=total,
            initial=start,
            bar_format=form,
            disable=quiet,
            dynamic_ncols=known,
            ncols=size[0],
            nrows=size[1],
        )

    def advance(self, step: int) -> None:
        if step != self.done:
            self.bar.update(step - self.done)  # less than nothing where a run goes back
            self.done = step

    def show(self, step: int, values: dict[str, float], left: float) -> None:
        size = f"{format_si(values.get('memory_allocated', 0.0))}B"
        if "memory_reserved" in values:
            size += f" of {format_si(values['memory_reserved'])}B"
        text = (
            f"loss {values['loss']:.4f}, {format_si(values['target_tokens_per_second'])} target tok/s, {size}, "
            f"{tqdm.format_interval(left)} left"
        )
        self.bar.set_description_str(text, refresh=False)
        self.advance(max(step, self.done))
        now = time.monotonic()
        self.text = f"step {step}/{self.total}: {text}"
        if self.plain and now - self.told >= PLAIN_SECONDS:
            self.told = now
            self.tell_plain()

    def tell(self, text: str) -> None:
        """A line that stays."""
        if self.speaks:
            tqdm.write(text, file=sys.stderr)

    def tell_plain(self) -> None:
        if self.text:
            self.tell(self.text)
            self.text = ""

    def close(self) -> None:
        if self.plain:
            self.tell_plain()
        self.bar.close()


def open_service(service: Tracker, folder: Path, start: int, resolved: Mapping):
    """Open a service; its package is imported only here."""
    kind = MODULES[type(service)]
    try:
        module = importlib.import_module(f"tunekit.loggers.{kind}")
    except ImportError as error:
        missing = (error.name or kind).partition(".")[0]
        raise UserError(f"report_to: {missing} is not installed: pip install 'tunekit[{kind}]'") from error
    try:
        return module.Logger(service, folder, start, resolved)
    except module.REFUSED as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"report_to: {kind} cannot be opened: {reason}") from error


def open_metrics_file(file: Path, start: int) -> IO[bytes]:
    """The file, open after its lines up to step `start`: later ones come again, and the last one may be half a line.

    A run that starts at 0 begins with an empty file: what stood before the first step comes again too.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_file():
            os.truncate(file, bytes_up_to_step(file, start) if start else 0)  # one call: it happens or not
        return file.open("ab", buffering=0)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}: give another output_dir=") from error


def write_final_metrics(folder: Path, step: int, **values: float) -> None:
    """A last line for what is only known when a run is over. One that a killed run has left is replaced by it."""
    file = folder / FILE
    try:
        os.truncate(file, bytes_up_to_step(file, step, before=f'"{next(iter(values))}"'))
        with file.open("ab") as out:
            out.write(encode_line(step, values))
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}: make room and start again") from error


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """What a run has written; half a line, which a killed one may leave, is passed over."""
    file = folder / FILE
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_bytes().splitlines() if step_of(line) < math.inf]


def encode_line(step: int, values: Mapping[str, float]) -> bytes:
    finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
    return json.dumps({"step": step} | finite, allow_nan=False).encode() + b"\n"


def bytes_up_to_step(file: Path, start: int, before: str = "\n") -> int:
    """How many bytes hold whole lines of steps up to `start`, and none that holds the word `before`."""
    size = 0
    with file.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n") or before.encode() in line[:-1] or step_of(line) > start:
                break
            size += len(line)
    return size


def step_of(line: bytes) -> float:
    """The step of a line; beyond every step if it is none of ours, as after a power cut."""
    try:
        value = json.loads(line)
    except ValueError:
        return math.inf
    return value["step"] if isinstance(value, dict) and isinstance(value.get("step"), int) else math.inf


def compile_seconds() -> float:
    """What torch.compile took so far, forward and backward; its module is there only once something was compiled."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0.0 if dynamo is None else dynamo.calculate_time_spent()["total_wall_time"]


def memory_stats(device: torch.device) -> dict[str, float]:
    """Bytes: tensors on a GPU and what torch holds there; resident on a CPU; now and at most."""
    if (stats := devices.memory_stats(device)) is not None:
        return allocator_stats(stats)
    status = Path("/proc/self/status")
    if status.is_file():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        sizes = {"memory_allocated": "VmRSS", "peak_memory": "VmHWM"}
        return {name: int(fields[field].split()[0]) * 1024 for name, field in sizes.items()}
    return {"peak_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}  # macOS: in bytes


def allocator_stats(stats: Mapping[str, int]) -> dict[str, float]:
    """Figures of torch's allocator on a GPU.

    Fragmentation is the share of what torch holds that no tensor uses. An allocation is tried again when the GPU had no
    room: torch then gives back all that it holds unused, which costs time.
    """
    allocated, held = stats.get("allocated_bytes.all.current", 0), stats.get("reserved_bytes.all.current", 0)
    return {
        "memory_allocated": allocated,
        "peak_memory": stats.get("allocated_bytes.all.peak", 0),
        "memory_reserved": held,
        "peak_memory_reserved": stats.get("reserved_bytes.all.peak", 0),
        "memory_fragmentation": 1 - allocated / held if held else 0.0,
        "num_alloc_retries": stats.get("num_alloc_retries", 0),
    }


def copy_to_host(values: Iterable[Tensor | float]) -> HostCopy | None:
    """The tensors among these for the host, in one transfer."""
    tensors = [v.detach().to(devices.accumulation_dtype(v.device)) for v in values if isinstance(v, Tensor)]
    return HostCopy(torch.stack(tensors)) if tensors else None


def format_si(value: float) -> str:
    return tqdm.format_sizeof(value, divisor=1000)
