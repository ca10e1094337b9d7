"""The files of a run directory, as a report reads them. Only the config must be there."""

import fcntl
import json
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tunekit.checkpoint import atomic, run_dir
from tunekit.checkpoint.final_checkpoint import VERIFICATION
from tunekit.errors import UserError
from tunekit.loggers import metrics_file
from tunekit.system import read_utf8

MAX_EPISODES = 64  # lines that are read from the end of episodes.jsonl

Lines = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class RunFiles:
    """A run: its config, metric lines, and what else its directory holds. Missing files are empty."""

    name: str
    directory: Path
    config: Mapping[str, Any]
    lines: Lines  # of metrics.jsonl
    info: Mapping[str, Any]  # run_info.json
    verification: Mapping[str, Any]
    evaluation: Mapping[str, Any]
    completions: Lines
    episodes: Lines  # the last ones
    is_finished: bool
    is_running: bool

    @property
    def last_step(self) -> int:
        return max((line["step"] for line in self.lines if "loss" in line), default=0)

    @property
    def num_steps(self) -> int | None:
        """Number of steps of the run; None if it is not known yet."""
        return self.info.get("num_steps") or self.config.get("max_steps")

    @property
    def recipe(self) -> str:
        return str(self.config.get("recipe", ""))


def read_run(directory: Path) -> RunFiles:
    """Read a run directory. Raises UserError, which names the file, if it is none or if a file is damaged."""
    directory = directory.expanduser()
    config_file = directory / run_dir.CONFIG
    if not config_file.is_file():
        problem = f"{directory}: no run directory (no {run_dir.CONFIG})"
        raise UserError(f"{problem}. Name the output_dir of a run.")
    return RunFiles(
        name=directory.resolve().name,
        directory=directory,
        config=read_config(config_file),
        lines=read_lines(directory / run_dir.METRICS),
        info=read_object(directory / run_dir.RUN_INFO),
        verification=read_object(directory / run_dir.FINAL / VERIFICATION),
        evaluation=read_object(directory / run_dir.EVALUATION),
        completions=read_lines(directory / run_dir.COMPLETIONS),
        episodes=read_lines(directory / metrics_file.EPISODES, MAX_EPISODES),
        is_finished=atomic.is_complete(directory / run_dir.FINAL),
        is_running=is_running(directory),
    )


def read_config(file: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(read_utf8(file))
    except yaml.YAMLError as error:
        problem = str(error).replace("\n", " ")
        raise UserError(f"{file}: cannot be parsed: {problem}. Fix it, or name another run.") from None
    if not isinstance(config, dict):
        raise UserError(f"{file}: not a mapping of config keys. Fix it, or name another run.")
    return config


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(read_utf8(file))
    except ValueError as error:
        raise UserError(f"{file}: not valid JSON: {error}. Delete it, and write the report again.") from None
    if not isinstance(value, dict):
        raise UserError(f"{file}: not a JSON object. Delete it, and write the report again.")
    return value


def read_lines(file: Path, last: int | None = None) -> list[dict[str, Any]]:
    """JSON objects with a step, one a line, or the last ones. A line that is being written is left out."""
    if not file.is_file():
        return []
    with file.open("rb") as stream:
        numbered = deque(((n, line) for n, line in enumerate(stream, 1) if line.endswith(b"\n")), last)
    lines = []
    for number, line in numbered:
        if metrics_file.line_step(line) == float("inf"):
            remedy = "Delete this line, or resume the run, which writes it again"
            raise UserError(f"{file}:{number}: not a JSON object with a step. {remedy}.")
        lines.append(json.loads(line))
    return lines


def is_running(directory: Path) -> bool:
    """Whether a process of this machine has locked a run directory.

    The lock is only tried if the process that it names exists, so that the start of a run is not disturbed.
    """
    file = directory / run_dir.LOCK
    try:
        process = file.read_text("utf-8").strip()
        if not process.isdecimal():
            return False
        os.kill(int(process), 0)
    except PermissionError:  # a process of another user
        pass
    except OSError:
        return False
    try:
        with file.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:  # the run has ended since
        return False
    return False
