"""Run directory: locked by one run at a time, with one config."""

import fcntl
import json
import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import IO, Any

import yaml

from tunekit.checkpoint import atomic
from tunekit.config.dump import diff_configs
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.system import read_utf8

CONFIG, METRICS, STATE, FINAL, LOCK = "config.yaml", "metrics.jsonl", "state", "final", ".lock"
COMPLETIONS = "completions.jsonl"  # answers of the model in training
EVALUATION = "evaluation.json"  # results of the recipe `evaluate`
REPORT, RUN_INFO = "report.html", "run_info.json"  # see `tunekit.report`
UPLOAD = "upload"  # checkpoints that are being uploaded
LENGTH_KEYS = {"max_steps", "epochs"}  # keys that users change to continue a finished run
PATH_KEYS = {"source", "model", "tokenizer", "adapter_path"}  # last parts of keys whose values may be paths
# Directories of the experiment trackers; see `tunekit.loggers.metric_logger`.
LOGS = ("tensorboard", "wandb", "mlflow", "comet")
START_PREFIX = "# began on "
# Logs of the worker processes, created before the run directory is locked; file with which users stop a run.
OUTPUT, STOP = "logs", "stop"
ROWS = "data"  # rows that Python code has passed, written before the run starts
EARLY_FILES = {LOCK, CONFIG + atomic.PARTIAL, OUTPUT, STOP, ROWS}


@dataclass(frozen=True)
class RunDir:
    """Run directory, locked until it is closed."""

    folder: Path
    lock: ExitStack  # empty on ranks other than the main process
    started_on: date
    resolved: str  # config as YAML
    dist: DistributedContext
    overwrite: bool = False  # delete the results of an earlier run

    def start(self) -> None:
        """Write the config after all checks have passed. With `overwrite`, delete earlier results now."""
        self.dist.run_on_main(partial(write_config, self.folder, self.started_on, self.resolved, self.overwrite))

    def restore_deleted(self) -> bool:
        """Write the directory, its lock and config again if it was deleted during the run. Returns whether it was."""
        if not self.dist.is_main_process or (self.folder / LOCK).exists():
            return False
        with atomic.wrap_write_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock.enter_context(acquire_lock(self.folder))
        if not (self.folder / CONFIG).exists():
            write_config(self.folder, self.started_on, self.resolved, overwrite=False)
        return True

    def close(self) -> None:
        self.lock.close()

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_run_dir(
    out: Path,
    resolved: str,
    mutable_keys: frozenset[str],
    overwrite: bool = False,
    dist: DistributedContext | None = None,
    continue_hint: str = "",
) -> RunDir:
    """Create or reopen the run directory `out`, and lock it on the main process. `resolved` is the config as YAML.

    A run with results can only be resumed with the same config, except for the keys and sections that match a pattern
    of `mutable_keys`. With `overwrite`, any config is accepted, and results are deleted when the run starts.
    `continue_hint` says in an error message how to start a new run from the result of a finished one.
    """
    dist = dist or DistributedContext(device="cpu")
    with ExitStack() as stack:
        if dist.is_main_process and not (out / CONFIG).exists() and (complete := find_complete_dirs(out)):
            dist.log(f"warning: {out / CONFIG} is missing. The config cannot be compared with that of {complete[-1]}.")
        lock = partial(lock_run_dir, stack, out, resolved, mutable_keys, overwrite, continue_hint)
        started_on = dist.run_on_main(lock)
        return RunDir(out, stack.pop_all(), started_on, resolved, dist, overwrite)


def lock_run_dir(
    stack: ExitStack, out: Path, resolved: str, mutable_keys: frozenset[str], overwrite: bool, continue_hint: str
) -> date:
    """Check and lock a directory, write the config, and return the start date of its run."""
    check_is_run_dir(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        stack.enter_context(acquire_lock(out))
        started_on = date.today() if overwrite else start_date(out)
    except OSError as error:
        raise UserError(f"output_dir: cannot write to {out}: {error.strerror}. Set another output_dir.") from error
    if not overwrite and has_results(out) and (out / CONFIG).exists():
        check_same_config(out, resolved, mutable_keys, continue_hint)
    if not overwrite or not (out / CONFIG).is_file():
        write_config(out, started_on, resolved, overwrite)
    return started_on


def write_config(out: Path, started_on: date, resolved: str, overwrite: bool) -> None:
    if overwrite:
        erase_results(out)
    atomic.write_text_atomic(out / CONFIG, f"{START_PREFIX}{started_on.isoformat()}\n{resolved}")


def check_is_run_dir(out: Path) -> None:
    """Raise UserError if a directory contains files but no run: neither a config nor a complete state or result."""
    if not out.is_dir() or (out / CONFIG).is_file() or find_complete_dirs(out):
        return
    if {path.name for path in out.iterdir()} - EARLY_FILES:
        raise UserError(f"output_dir: {out} is not empty and not a run directory. Set another output_dir.")


def find_complete_dirs(out: Path) -> list[Path]:
    """Complete training states and results in a run directory."""
    patterns = f"{STATE}/*/{atomic.MARK}", f"{FINAL}/{atomic.MARK}"
    return [mark.parent for mark in sorted(mark for pattern in patterns for mark in out.glob(pattern))]


def check_final_files(out: Path) -> None:
    """Raise UserError if a file of a complete result was deleted."""
    missing = atomic.find_missing_file(out / FINAL)
    if missing is not None:
        states = [str(path) for path in find_complete_dirs(out) if path.name != FINAL]
        remedy = f"to write it again from {states[-1]}" if states else "to train again: no training state is left"
        raise UserError(f"{missing}: file is missing. Delete the directory {out / FINAL} and rerun {remedy}.")


def start_date(out: Path) -> date:
    """Start date of the run in a directory, by default today. Chat templates may use it."""
    config = out / CONFIG
    header = read_utf8(config).partition("\n")[0] if has_results(out) and config.is_file() else ""
    return date.fromisoformat(header.removeprefix(START_PREFIX)) if header.startswith(START_PREFIX) else date.today()


def erase_results(out: Path) -> None:
    """Delete the results of a run, and nothing else. The config stays and marks a run directory."""
    try:
        for name in (STATE, FINAL, UPLOAD, *LOGS):
            for suffix in (atomic.PARTIAL, atomic.PREVIOUS, ""):
                atomic.remove_dir(out / (name + suffix))
        for name in (METRICS, COMPLETIONS, EVALUATION, REPORT, RUN_INFO):
            (out / name).unlink(missing_ok=True)
    except OSError as error:
        problem = f"cannot delete results in {out}: {error.strerror}"
        raise UserError(f"output_dir: {problem}. Set another output_dir.") from error


def has_results(out: Path) -> bool:
    """Whether a directory has results, which belong to one config."""
    return any((out / name).exists() for name in (STATE, FINAL, METRICS))


def check_same_config(out: Path, resolved: str, mutable_keys: frozenset[str], continue_hint: str) -> None:
    """Raise UserError if the config differs from that of the run in the directory."""
    try:
        old, new = yaml.safe_load((out / CONFIG).read_text(encoding="utf-8")), yaml.safe_load(resolved)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        remedy = "Fix it, pass --overwrite, or set another output_dir."
        raise UserError(f"{out / CONFIG}: cannot be parsed. {remedy}") from error
    changed = [
        (key, saved, given)
        for key, saved, given in diff_configs(old, new)
        if not (matches_key(key, mutable_keys) or (key.split(".")[-1] in PATH_KEYS and is_same_path(saved, given)))
    ]
    format_value = partial(json.dumps, ensure_ascii=False, default=str)  # YAML dates are not JSON
    differences = "; ".join(
        f"{key}: {format_value(saved)} saved, {format_value(given)} given" for key, saved, given in changed
    )
    if changed and continue_hint and {key for key, *_ in changed} <= LENGTH_KEYS and atomic.is_complete(out / FINAL):
        hint = f"Continue from its result with {continue_hint} and another output_dir, or pass --overwrite to restart."
        raise UserError(f"output_dir: the run in {out} is complete ({differences}). {hint}")
    if changed:
        raise UserError(
            f"output_dir: {out} was created with a different config ({differences}). "
            "Pass --overwrite, or set another output_dir. docs/checkpoints.md lists the keys that may change."
        )


def matches_key(key: str, patterns: Iterable[str]) -> bool:
    """Whether a dotted key, or a section that contains it, matches a pattern."""
    parts = key.split(".")
    sections = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return any(fnmatchcase(section, pattern) for section in sections for pattern in patterns)


def is_same_path(saved: Any, given: Any) -> bool:
    """Whether two values are paths of the same file or directory. Training states compare its rows."""
    try:
        return isinstance(saved, str) and isinstance(given, str) and Path(saved).samefile(given)
    except (OSError, ValueError):  # no such file, or no valid path
        return False


def acquire_lock(out: Path) -> IO[str]:
    """Lock a directory until the returned file is closed or the process ends. Raises UserError if it is locked."""
    file = (out / LOCK).open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        problem = f"{out} is in use by process {file.read().strip()}"
        file.close()
        raise UserError(f"output_dir: {problem}. Wait for it, or set another output_dir.") from None
    file.seek(0)
    file.truncate()
    file.write(str(os.getpid()))
    file.flush()
    return file
