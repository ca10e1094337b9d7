"""Files of a run with a JSON object per line, each with its step: metrics, answers, and episodes with their tokens."""

import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from tunekit.errors import UserError

FILE, COMPLETIONS, EPISODES = "metrics.jsonl", "completions.jsonl", "episodes.jsonl"


class StepLog:
    """A file of lines, truncated after step `start`: later lines will be written again. Created when it is opened.

    A run that starts at step 0 starts with an empty file, because step 0 is logged again.
    """

    def __init__(self, path: Path, start: int) -> None:
        self.path, self.file = path, None
        try:
            if path.is_file():
                os.truncate(path, bytes_up_to_step(path, start) if start else 0)  # atomic
        except OSError as error:
            raise UserError(f"{path}: write failed, {error.strerror}. Set another output_dir.") from error

    def open(self) -> IO[bytes]:
        """The open file. A file that was deleted is written under its name again."""
        try:
            if self.file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.file = self.path.open("a+b", buffering=0)
            self.file = reopen_if_deleted(self.file)
        except OSError as error:
            raise UserError(f"{self.path}: write failed, {error.strerror}. Set another output_dir.") from error
        return self.file

    def write(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append lines of one step."""
        lines, file = b"".join(encode_line(step, row) for row in rows), self.open()
        try:
            num_bytes = file.write(lines)
        except OSError as error:
            raise UserError(f"{self.path}: write failed, {error.strerror}. Fix the disk and rerun.") from error
        if num_bytes != len(lines):
            raise UserError(f"{self.path}: write failed, the disk is full. Free disk space and rerun.")

    def rewind(self, step: int) -> None:
        """Delete the lines after a step."""
        if self.file is not None:
            self.open()
        if self.path.is_file():
            os.truncate(self.path, bytes_up_to_step(self.path, step))

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def reopen_if_deleted(file: IO[bytes]) -> IO[bytes]:
    """Write an open file under its name again if it was deleted. Returns the open file."""
    if os.fstat(file.fileno()).st_nlink > 0:
        return file
    path = Path(file.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    file.seek(0)
    path.write_bytes(file.read())
    file.close()
    return path.open("a+b", buffering=0)


def write_final_metrics(folder: Path, step: int, **values: float) -> None:
    """Append a final line, for values that are known after training. Replaces such a line of an interrupted run.

    `step` is that of the weights, which may be an earlier one than the last.
    """
    file = folder / FILE
    try:
        if file.exists():
            os.truncate(file, bytes_up_to_step(file, sys.maxsize, before=f'"{next(iter(values))}"'))
        with file.open("ab") as out:
            out.write(encode_line(step, values))
    except OSError as error:
        raise UserError(f"{file}: write failed, {error.strerror}. Fix the disk and rerun.") from error


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read the metrics of a run. Skips incomplete lines, which a killed run may leave."""
    file = folder / FILE
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_bytes().splitlines() if line_step(line) < math.inf]


def encode_line(step: int, values: Mapping[str, Any]) -> bytes:
    finite = {name: None if is_non_finite(value) else value for name, value in values.items()}
    return json.dumps({"step": step} | finite, allow_nan=False).encode() + b"\n"


def is_non_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def bytes_up_to_step(file: Path, start: int, before: str = "\n") -> int:
    """Number of bytes up to the first line that is incomplete, of a step after `start`, or contains `before`."""
    size = 0
    with file.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n") or before.encode() in line[:-1] or line_step(line) > start:
                break
            size += len(line)
    return size


def line_step(line: bytes) -> float:
    """Step of a line; Inf if the line is invalid, as after a power failure."""
    try:
        value = json.loads(line)
    except ValueError:
        return math.inf
    return value["step"] if isinstance(value, dict) and isinstance(value.get("step"), int) else math.inf
