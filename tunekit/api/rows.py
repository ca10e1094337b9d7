"""Rows of training data from Python: any iterable of dicts, a table of pandas or polars, or the name of a dataset.

Rows in memory are written to a file in the run directory, from which config.yaml repeats the run on the command line.
"""

import hashlib
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from tunekit.checkpoint import run_dir
from tunekit.checkpoint.atomic import wrap_write_errors, write_text_atomic
from tunekit.errors import UserError


@runtime_checkable
class PolarsFrame(Protocol):
    """A table of polars."""

    def to_dicts(self) -> list[dict[str, Any]]: ...


class PandasFrame(Protocol):
    """A table of pandas."""

    @property
    def iloc(self) -> Any: ...

    def notna(self) -> Any: ...


class HubDataset(Protocol):
    """A dataset of the package `datasets`."""

    @property
    def column_names(self) -> Any: ...


Row = Mapping[str, Any]
Rows = Iterable[Row] | PandasFrame | PolarsFrame | HubDataset | str | os.PathLike[str]


@dataclass(frozen=True)
class MemoryRows:
    """Rows in memory as JSON lines."""

    where: str  # the argument, for messages
    text: str
    count: int

    @property
    def fingerprint(self) -> str:
        """Hash of the rows and their order, 16 hexadecimal digits."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    def write(self, file: Path) -> None:
        """Write the file, unless it has these rows."""
        with wrap_write_errors(file):
            if not file.is_file() or file.read_bytes() != self.text.encode():
                file.parent.mkdir(parents=True, exist_ok=True)
                write_text_atomic(file, self.text)

    def write_for_run(self, directory: Path, name: str, overwrite: bool) -> Path:
        """Write the rows of a run, and return their file. Raises UserError if its results are of other rows."""
        file = directory / run_dir.ROWS / f"{name}.jsonl"
        run_dir.check_is_run_dir(directory)
        with wrap_write_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
        with run_dir.acquire_lock(directory):
            if not overwrite and run_dir.has_results(directory) and file.is_file():
                self.check_same(file, directory)
            self.write(file)
        return file

    def check_same(self, file: Path, directory: Path) -> None:
        saved = file.read_bytes()
        if saved != self.text.encode():
            num_saved = saved.count(b"\n")
            counts = f"{num_saved:,} rows saved, {self.count:,} given"
            remedy = f"Pass the rows in {file} to resume, overwrite=True to train again, or another output_dir."
            raise UserError(f"{self.where}: not those of the run in {directory} ({counts}). {remedy}")


def read_rows(rows: Rows, where: str) -> str | MemoryRows:
    """The name or path of a dataset, or rows in memory. Raises UserError for anything else, with the row."""
    if isinstance(rows, str | os.PathLike):
        return os.fspath(rows)
    lines = [encode_row(row, f"{where} row {number}") for number, row in enumerate(iter_rows(rows, where), start=1)]
    if not lines:
        raise UserError(f"{where}: has no rows. Pass at least one.")
    return MemoryRows(where, "".join(lines), len(lines))


def iter_rows(rows: Any, where: str) -> Iterator[Any]:
    """The rows of a table or an iterable."""
    pandas = sys.modules.get("pandas")  # a table exists only if the package is imported
    if pandas is not None and isinstance(rows, pandas.DataFrame):
        return iter(rows.astype(object).where(rows.notna(), None).to_dict("records"))
    if isinstance(rows, PolarsFrame):
        return iter(rows.to_dicts())
    if isinstance(rows, Mapping):
        splits = ", ".join(map(repr, rows))[:80]
        raise UserError(f"{where}: expected rows, got a dict with {splits}. Pass one split of it, or a list of dicts.")
    if not isinstance(rows, Iterable):
        raise UserError(f"{where}: expected rows, got {type(rows).__name__}. Pass a list of dicts, a table or a path.")
    return iter(rows)


def encode_row(row: Any, where: str) -> str:
    """A row as a line of JSON. Raises UserError, which starts with `where`, for values that JSON cannot hold."""
    if not isinstance(row, Mapping):
        raise UserError(f"{where}: expected a dict, got {type(row).__name__}. Name its columns.")
    line = json.dumps(to_json_value(row, where), ensure_ascii=False)
    try:
        line.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: has half of a surrogate pair, {error.object[error.start]!r}. Remove it.") from None
    return line + "\n"


def to_json_value(value: Any, where: str) -> Any:
    """A value as JSON holds it. Arrays and tensors are lists."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise UserError(f"{where}: names must be text, got {key!r}. Convert it with str.")
        return {str(key): to_json_value(item, f"{where}: {key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item, where) for item in value]
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return to_json_value(value.tolist(), where)
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        raise UserError(f"{where}: {value} is no value of a row. Replace it by None, or remove the row.")
    problem = f"expected text, numbers, lists and dicts, got {type(value).__name__}"
    raise UserError(f"{where}: {problem}. Pictures and bytes are read from files only. Convert the value to text.")
