"""The folder of a run: one process, one config."""

import fcntl
import os
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from types import TracebackType
from typing import IO

import yaml

from tunekit.checkpoint import atomic
from tunekit.config.dump import differences
from tunekit.errors import UserError

CONFIG, METRICS, STATE, FINAL, LOCK = "config.yaml", "metrics.jsonl", "state", "final", ".lock"
EVALUATION = "evaluation.json"  # what `evaluate` found about the run's model
UPLOAD = "upload"  # checkpoints on their way to the Hub
# What the loggers write; see `tunekit.metrics`.
LOGS = ("tensorboard", "wandb", "mlflow", "comet")
BEGAN = "# began on "
BEFORE_CONFIG = {LOCK, CONFIG + atomic.PARTIAL}


@dataclass(frozen=True)
class Workspace:
    """Where a run writes. Nobody else does until it is closed."""

    folder: Path
    lock: IO[str]
    day: date  # when the run began
    resolved: str  # its config in YAML
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
        if self.fresh:
            erase(self.folder)
        atomic.write_text(self.config, f"{BEGAN}{self.day.isoformat()}\n{self.resolved}")

    def close(self) -> None:
        self.lock.close()

    def __enter__(self) -> "Workspace":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def claim(out: Path, resolved: str, live: frozenset[str], fresh: bool = False) -> Workspace:
    """The folder of a run, made or taken up again. `resolved` is its config in YAML.

    A run that has left results goes on only with the same config; top-level keys in `live` may change. With `fresh`
    any config will do, and the results stay until the run begins.
    """
    if out.is_dir() and not (out / CONFIG).is_file() and {path.name for path in out.iterdir()} - BEFORE_CONFIG:
        raise UserError(f"{out} holds files and is not the folder of a run: give another out=")
    try:
        out.mkdir(parents=True, exist_ok=True)
        space = Workspace(out, locked(out), date.today() if fresh else first_day(out), resolved, fresh)
    except OSError as error:
        raise UserError(f"out: cannot write in {out}: {error.strerror}: give another out=") from error
    try:
        if not fresh and started(out):
            compare(space, resolved, live)
        if not fresh or not (out / CONFIG).is_file():
            space.begin()
    except UserError:
        space.close()
        raise
    return space


def first_day(out: Path) -> date:
    """The day on which the run in a folder began, today if there is none. Chat templates may print it."""
    config = out / CONFIG
    first = config.read_text(encoding="utf-8").partition("\n")[0] if started(out) and config.is_file() else ""
    return date.fromisoformat(first.removeprefix(BEGAN)) if first.startswith(BEGAN) else date.today()


def erase(out: Path) -> None:
    """Remove what a run wrote into its folder, and nothing else. The config stays: the folder is that of a run."""
    try:
        for name in (STATE, FINAL, UPLOAD, *LOGS):
            for ending in (atomic.PARTIAL, atomic.PREVIOUS, ""):
                atomic.remove(out / (name + ending))
        for name in (METRICS, EVALUATION):
            (out / name).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"out: cannot erase {out}: {error.strerror}: give another out=") from error


def started(out: Path) -> bool:
    """Whether there is something that another config would contradict."""
    return any((out / name).exists() for name in (STATE, FINAL, METRICS))


def compare(space: Workspace, resolved: str, live: frozenset[str]) -> None:
    try:
        old, new = yaml.safe_load(space.config.read_text(encoding="utf-8")), yaml.safe_load(resolved)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {space.config}: mend it, start over with --fresh or give another out=") from error
    changed = [found for found in differences(old, new) if found[0].partition(".")[0] not in live]
    found = [f"{key}: {before!r} there, {now!r} now" for key, before, now in changed]
    if found:
        raise UserError(
            f"{space.folder} is the run of another config ({'; '.join(found)}): "
            "--fresh starts over, or give another out="
        )


def locked(out: Path) -> IO[str]:
    """The lock of a folder: gone when the file is closed, however the process ends."""
    file = (out / LOCK).open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip()
        file.close()
        raise UserError(f"{out} is in use by process {holder}: wait for it, or give another out=") from None
    file.seek(0)
    file.truncate()
    file.write(str(os.getpid()))
    file.flush()
    return file
