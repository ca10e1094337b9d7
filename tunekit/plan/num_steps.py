"""How many steps a config takes, as far as its rows tell before they are prepared: those that lie on this machine."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tunekit.data.dataloader.mixture import MixtureBase
from tunekit.data.dataloader.sampler import StepIndex
from tunekit.data.datasets import DatasetConfig
from tunekit.data.readers.open_dataset import find_data_files, open_dataset, parse_split
from tunekit.data.readers.row_reader import Row, RowReader
from tunekit.errors import UserError

LARGEST = 2**31  # bytes of files that are counted: reading more takes too long
LOOKED_AT = 200  # rows whose texts tell how long rows are
LETTERS = 4  # of a token: bytes of the texts that models are trained on are near it


@dataclass(frozen=True)
class StepCount:
    """Steps of a run."""

    steps: int
    rows: int | None = None  # of an epoch, before they are packed
    epochs: int = 1
    exact: bool = True  # not where rows are packed, whose tokens nobody has counted


def count_steps(cfg: Any) -> StepCount | None:
    """As `steps` says, or as the rows do; None if they are not here, or a stream."""
    said = vars(cfg)
    if said.get("max_steps") is not None:
        return StepCount(said["max_steps"])
    mix = MixtureBase.from_config(said["data"])
    try:
        tables = [opened(rows) for rows in mix.dataset_configs]
    except (UserError, OSError):  # what is wrong with them is told where they are prepared
        return None
    counts = [table.count for table in tables if table is not None and table.count is not None]
    if len(counts) < len(tables):
        return None
    taken = mix.rows_per_epoch(counts)
    rows = sum(taken)
    if mix.capacity is not None:
        shares = [n * sampled(table, mix.max_length) for n, table in zip(taken, filter(None, tables), strict=True)]
        rows = max(1, round(sum(shares) / mix.max_length))
    steps = StepIndex(lambda _: rows, said["global_batch_size"]).num_steps(said["epochs"])
    return StepCount(steps, sum(taken), said["epochs"], mix.capacity is None)


def opened(rows: DatasetConfig) -> RowReader | None:
    """The rows, if they lie here in files that are soon read."""
    files = find_data_files(rows.source, parse_split(rows.split).name)
    if rows.streaming or not files or sum(Path(file).stat().st_size for file in files) > LARGEST:
        return None
    return open_dataset(rows.source, rows.split, rows.max_samples)


def sampled(table: RowReader, most: int) -> float:
    """Tokens of a row, cut at `most`, on average over the first rows."""
    read = (row for row in islice(table.rows, LOOKED_AT) if isinstance(row, Row))
    lengths = [min(most, sum(map(len, texts(row.fields))) / LETTERS) for row in read]
    return sum(lengths) / max(1, len(lengths))


def texts(value: Any) -> Iterator[str]:
    """Every text in a row."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        parts: Iterable[Any] = value.values() if isinstance(value, dict) else value
        for part in parts:
            yield from texts(part)
