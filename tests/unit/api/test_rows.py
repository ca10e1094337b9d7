"""Rows from Python: every kind of table has the same lines, and values that JSON cannot hold are named."""

import datetime
import math
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch

from tunekit.api.rows import MemoryRows, read_rows
from tunekit.checkpoint import run_dir
from tunekit.errors import UserError

ROWS = [{"prompt": "à", "completion": "b", "n": 1}, {"prompt": "c", "completion": None, "n": 2}]


class Table:
    """A table with the method of polars."""

    def to_dicts(self) -> list[dict[str, Any]]:
        return ROWS


def memory(rows: Any) -> MemoryRows:
    result = read_rows(rows, "rows")
    assert isinstance(result, MemoryRows)
    return result


@pytest.mark.parametrize(
    "table",
    [
        tuple(ROWS),
        (row for row in ROWS),
        pd.DataFrame(ROWS),
        pd.DataFrame(ROWS, index=["x", "y"]),
        datasets.Dataset.from_list(ROWS),
        datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
        Table(),
    ],
    ids=lambda table: type(table).__name__,
)
def test_tables_have_the_same_rows(table: Any) -> None:
    assert memory(table) == memory(ROWS)


def test_order_and_values_change_the_fingerprint() -> None:
    assert memory(ROWS).fingerprint == memory([dict(row) for row in ROWS]).fingerprint
    changed = [ROWS[::-1], [*ROWS, ROWS[0]], [ROWS[0], ROWS[1] | {"n": 3}]]
    assert len({memory(rows).fingerprint for rows in (ROWS, *changed)}) == 4


def test_arrays_are_lists() -> None:
    row = {"a": np.arange(2), "b": torch.ones(1), "c": np.float32(0.5), "d": (1, 2), "e": True}
    assert memory([row]).text == '{"a": [0, 1], "b": [1.0], "c": 0.5, "d": [1, 2], "e": true}\n'


def test_names_and_paths_are_kept() -> None:
    assert read_rows("owner/name", "rows") == "owner/name"
    assert read_rows(Path("x/rows.jsonl"), "rows") == "x/rows.jsonl"


@pytest.mark.parametrize(
    ("rows", "where"),
    [
        ([], "rows"),
        (3, "rows"),
        ({"train": ROWS}, "rows"),
        (datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}), "rows"),
        ([ROWS[0], "text"], "rows row 2"),
        ([{"image": b"PNG"}], "rows row 1: image"),
        ([{"messages": [{"content": b"PNG"}]}], "rows row 1: messages: content"),
        ([{"time": datetime.datetime(2026, 1, 1)}], "rows row 1: time"),
        ([{"weight": math.nan}], "rows row 1: weight"),
        ([{3: "x"}], "rows row 1"),
        ([{"text": "\ud800"}], "rows row 1"),
    ],
)
def test_other_rows_are_errors_in_one_line(rows: Any, where: str) -> None:
    with pytest.raises(UserError) as error:
        read_rows(rows, "rows")
    assert str(error.value).startswith(f"{where}: ") and "\n" not in str(error.value)


def test_other_rows_than_those_of_the_results_are_an_error(tmp_path: Path) -> None:
    file = memory(ROWS).write_for_run(tmp_path / "run", "train", False)
    assert file.read_text() == memory(ROWS).text
    memory(ROWS[:1]).write_for_run(tmp_path / "run", "train", False)  # there are no results yet
    for name in (run_dir.CONFIG, run_dir.METRICS):
        (tmp_path / "run" / name).touch()
    with pytest.raises(UserError, match="1 rows saved, 2 given"):
        memory(ROWS).write_for_run(tmp_path / "run", "train", False)
    memory(ROWS).write_for_run(tmp_path / "run", "train", True)
    memory(ROWS).write_for_run(tmp_path / "run", "train", False)


def test_files_of_others_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match="not a run directory"):
        memory(ROWS).write_for_run(tmp_path, "train", False)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
