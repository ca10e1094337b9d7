"""The folder of a run: one process, or its ranks, and one config."""

import fcntl
import json
import os
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO

import yaml

from tunekit.checkpoint import atomic
from tunekit.config.dump import diff_configs
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError

CONFIG, METRICS, STATE, FINAL, LOCK = "config.yaml", "metrics.jsonl", "state", "final", ".lock"
EVALUATION = "evaluation.json"  # what `evaluate` found about the run's model
UPLOAD = "upload"  # checkpoints on their way to the Hub
LONGER = {"max_steps", "epochs"}  # keys by which a person wants more of a run that has finished
# What the loggers write; see `tunekit.loggers.metric_logger`.
LOGS = ("tensorboard", "wandb", "mlflow", "comet")
BEGAN = "# began on "
# What the processes of a run print, before one of them claims its folder; how a person asks it to stop.
PRINTED, STOP = "logs", "stop"
BEFORE_CONFIG = {LOCK, CONFIG + atomic.PARTIAL, PRINTED, STOP}


@dataclass(frozen=True)
class RunDir:
    """Where a run writes. Nobody else does until it is closed."""

    folder: Path
    lock: ExitStack  # of the main process; the others have none
    day: date  # when the run began
    resolved: str  # its config in YAML
    run: DistributedContext
    fresh: bool = False  # what an earlier run has left there is to go

    @property
    def config(self) -> Path:
        return self.folder / CONFIG

    @property
    def metrics(self) -> Path:
        return self.folder / METRICS

    @property
    def state(self) -> Path:
        return self.folder / STATE

    @property
    def final(self) -> Path:
        return self.folder / FINAL

    def begin(self) -> None:
        """All is checked and the run begins: if it starts over, what there was goes now."""
        self.run.shared(partial(write_config, self.folder, self.day, self.resolved, self.fresh))

    def close(self) -> None:
        self.lock.close()

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open_run_dir(
    out: Path,
    resolved: str,
    live: frozenset[str],
    fresh: bool = False,
    run: DistributedContext | None = None,
    further: str = "",
) -> RunDir:
    """The folder of a run, made or taken up again. `resolved` is its config in YAML.

    A run that has left results goes on only with the same config; top-level keys in `live` may change. With `fresh`
    any config will do, and the results stay until the run begins. Of all ranks the main process has the lock. `further`
    is what to say for a run that begins with what this one has made.
    """
    run = run or DistributedContext(device="cpu")
    with ExitStack() as held:
        day = run.shared(partial(lock_run_dir, held, out, resolved, live, fresh, further))
        return RunDir(out, held.pop_all(), day, resolved, run, fresh)


def lock_run_dir(held: ExitStack, out: Path, resolved: str, live: frozenset[str], fresh: bool, further: str) -> date:
    """Lock a folder, look whether it is the right one, and put the config there; the day when its run began."""
    check_is_run_dir(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        held.enter_context(acquire_lock(out))
        day = date.today() if fresh else start_date(out)
    except OSError as error:
        raise UserError(f"output_dir: cannot write in {out}: {error.strerror}: give another output_dir=") from error
    if not fresh and has_results(out):
        check_same_config(out, resolved, live, further)
    if not fresh or not (out / CONFIG).is_file():
        write_config(out, day, resolved, fresh)
    return day


def write_config(out: Path, day: date, resolved: str, fresh: bool) -> None:
    if fresh:
        erase_results(out)
    atomic.write_text_atomic(out / CONFIG, f"{BEGAN}{day.isoformat()}\n{resolved}")


def check_is_run_dir(out: Path) -> None:
    """Whether a folder is that of a run, or may become one."""
    if out.is_dir() and not (out / CONFIG).is_file() and {path.name for path in out.iterdir()} - BEFORE_CONFIG:
        raise UserError(f"{out} holds files and is not the folder of a run: give another output_dir=")


def start_date(out: Path) -> date:
    """The day on which the run in a folder began, today if there is none. Chat templates may print it."""
    config = out / CONFIG
    first = config.read_text(encoding="utf-8").partition("\n")[0] if has_results(out) and config.is_file() else ""
    return date.fromisoformat(first.removeprefix(BEGAN)) if first.startswith(BEGAN) else date.today()


def erase_results(out: Path) -> None:
    """Remove what a run wrote into its folder, and nothing else. The config stays: the folder is that of a run."""
    try:
        for name in (STATE, FINAL, UPLOAD, *LOGS):
            for ending in (atomic.PARTIAL, atomic.PREVIOUS, ""):
                atomic.remove_dir(out / (name + ending))
        for name in (METRICS, EVALUATION):
            (out / name).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"output_dir: cannot erase {out}: {error.strerror}: give another output_dir=") from error


def has_results(out: Path) -> bool:
    """Whether there is something that another config would contradict."""
    return any((out / name).exists() for name in (STATE, FINAL, METRICS))


def check_same_config(out: Path, resolved: str, live: frozenset[str], further: str) -> None:
    """UserError for another config than the one that a run began with."""
    try:
        old, new = yaml.safe_load((out / CONFIG).read_text(encoding="utf-8")), yaml.safe_load(resolved)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read {out / CONFIG}: mend it, start over with --overwrite or give another output_dir="
        ) from error
    changed = [found for found in diff_configs(old, new) if found[0].partition(".")[0] not in live]
    told = partial(json.dumps, ensure_ascii=False, default=str)  # an edited file may hold a date
    found = "; ".join(f"{key}: {told(before)} there, {told(now)} now" for key, before, now in changed)
    if found and further and {key for key, *_ in changed} <= LONGER and atomic.is_complete(out / FINAL):
        mend = f"{further} and another output_dir= train on what it made, --overwrite starts over"
        raise UserError(f"{out} has finished ({found}): {mend}")
    if found:
        raise UserError(
            f"{out} is the run of another config ({found}): --overwrite starts over, or give another output_dir="
        )


def acquire_lock(out: Path) -> IO[str]:
    """The lock of a folder: gone when the file is closed, however the process ends."""
    file = (out / LOCK).open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip()
        file.close()
        raise UserError(f"{out} is in use by process {holder}: wait for it, or give another output_dir=") from None
    file.seek(0)
    file.truncate()
    file.write(str(os.getpid()))
    file.flush()
    return file
