"""Number of steps of a config, counted from local data files before they are tokenized."""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tunekit.config.secrets import iter_strings
from tunekit.data.dataloader.mixture import MixtureBase
from tunekit.data.dataloader.sampler import StepIndex
from tunekit.data.datasets import DatasetConfig
from tunekit.data.readers.open_dataset import find_data_files
from tunekit.data.readers.row_reader import Row, RowReader
from tunekit.errors import UserError
from tunekit.plan.workload import TrainingOptions

MAX_FILE_BYTES = 2**31  # larger files take too long to count
NUM_SAMPLED_ROWS = 200  # rows from which the mean length is estimated
BYTES_PER_TOKEN = 4  # typical of text that models are trained on


@dataclass(frozen=True)
class StepCount:
    """Number of steps of a run."""

    steps: int
    rows: int | None = None  # of an epoch, before they are packed
    epochs: int = 1
    exact: bool = True  # False if rows are packed, because their tokens are estimated


def count_steps(cfg: TrainingOptions) -> StepCount | None:
    """Return `max_steps`, or count the rows. None if the rows are not local files or are streamed."""
    if cfg.max_steps is not None:
        return StepCount(cfg.max_steps)
    mix = MixtureBase.from_config(cfg.data)
    try:
        tables = [open_rows(rows) for rows in mix.dataset_configs]
    except (UserError, OSError):  # data preparation reports these errors
        return None
    counts = [table.count for table in tables if table is not None and table.count is not None]
    if len(counts) < len(tables):
        return None
    rows_per_member = mix.rows_per_epoch(counts)
    rows = sum(rows_per_member)
    if mix.capacity is not None:
        num_tokens = [
            n * mean_row_tokens(table, mix.max_length)
            for n, table in zip(rows_per_member, filter(None, tables), strict=True)
        ]
        rows = max(1, round(sum(num_tokens) / mix.max_length))
    steps = StepIndex(lambda _: rows, cfg.global_batch_size).num_steps(cfg.epochs)
    return StepCount(steps, sum(rows_per_member), cfg.epochs, mix.capacity is None)


def open_rows(rows: DatasetConfig) -> RowReader | None:
    """Open the rows if they are in local files that are small enough to count."""
    files = find_data_files(rows.source, rows.split)
    if rows.streaming or not files or sum(Path(file).stat().st_size for file in files) > MAX_FILE_BYTES:
        return None
    return rows.open_rows()


def mean_row_tokens(table: RowReader, max_length: int) -> float:
    """Estimated tokens per row, truncated to `max_length`, averaged over the first rows."""
    sample = (row for row in islice(table.rows, NUM_SAMPLED_ROWS) if isinstance(row, Row))
    lengths = [min(max_length, sum(map(len, iter_strings(row.fields))) / BYTES_PER_TOKEN) for row in sample]
    return sum(lengths) / max(1, len(lengths))
