"""Preprocessing: tokenize all rows of a dataset in worker processes, or open the cached result."""

import json
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from tunekit.data.datasets import DatasetConfig, Fields
from tunekit.data.preprocess import cache, user_modules, worker, worker_pool
from tunekit.data.preprocess.fingerprint import fingerprint
from tunekit.data.preprocess.tokenized_dataset import (
    PreprocessSummary,
    TokenizedChunk,
    TokenizedDataset,
    TokenizedDatasetWriter,
)
from tunekit.data.readers.row_reader import CHUNK_ROWS, BadRow, Row, RowChunk, RowReader
from tunekit.data.row_errors import USER_CODE_ERRORS, format_row_error
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError

Result = TypeVar("Result")
MAX_PROBED_ROWS = 100  # rows that are read to detect or describe the format
MIN_POOL_ROWS = 2_000  # fewer rows are done before worker processes have started


def preprocess_dataset(config: DatasetConfig, tokenizer: Tokenizer, dist: DistributedContext) -> TokenizedDataset:
    """All rows as memory-mapped documents. Raise UserError for the first bad row. Rank 0 shows a progress bar."""
    tokenizer = config.prepare_tokenizer(tokenizer)
    reader = config.open_rows()
    key = fingerprint(config, tokenizer, reader)
    build = partial(write_documents, config=config, tokenizer=tokenizer, reader=reader, dist=dist)
    dataset = cache.get_or_build(key, build, dist.log)
    bad_rows = BadRowPolicy(config, None)
    bad_rows.add(read_bad_rows(dataset.summary.bad_rows), dataset.summary.rows)
    bad_rows.check()  # a cached dataset may have been built with a higher limit
    return dataset


def tokenize_chunks(
    config: DatasetConfig, tokenizer: Tokenizer, chunks: Iterable[RowChunk], workers: int
) -> Generator[TokenizedChunk, None, None]:
    """Tokenize chunks in their order, in worker processes or, with `workers=0`, in this one.

    `tokenizer` is the result of `config.prepare_tokenizer`.
    """
    if workers == 0:
        yield from (worker.tokenize_chunk(config, tokenizer, chunk) for chunk in chunks)
        return
    with worker_pool.WorkerPool(config, tokenizer, chunks, workers) as results:
        yield from results


def num_workers(config: DatasetConfig, num_rows: int | None) -> int:
    """Worker processes for `num_rows` rows (None: unknown): one per core, or 0 if starting them takes longer."""
    # Classes that are defined in a notebook cannot be imported by other processes.
    if any(module.name == "__main__" for module in user_modules.user_modules(config)):
        return 0
    if config.num_proc is not None:
        return config.num_proc
    workers = min(worker_pool.num_cpus(), worker_pool.MAX_WORKERS)
    if num_rows is not None:
        workers = min(workers, -(-num_rows // CHUNK_ROWS)) if num_rows >= MIN_POOL_ROWS else 0
    return 0 if workers == 1 else workers


def describe_format(config: DatasetConfig, reader: RowReader) -> str:
    """Description of the format of the first row that can be read. Errors are reported when rows are preprocessed."""
    return probe_rows(config, reader, config.describe)[0] or ""


def detect_first_row(config: DatasetConfig, detect: Callable[[Fields], Result]) -> Result:
    """Result of `detect` for the first row that can be read. Raise UserError if there is none."""
    result, error_message = probe_rows(config, config.open_rows(), detect)
    if result is None:
        raise UserError(f"{config.source}: {error_message}")
    return result


def probe_rows(config: DatasetConfig, reader: RowReader, fn: Callable[[Fields], Result]) -> tuple[Result | None, str]:
    """Result of `fn` for the first row for which it and the transforms raise no error; or None, and the last error."""
    error_message = "has no rows"
    for row in islice(reader.rows, MAX_PROBED_ROWS):
        if isinstance(row, Row):
            try:
                fields = config.apply_transforms(row.fields)
                if fields is not None:
                    return fn(fields), ""
            except (UserError, *USER_CODE_ERRORS) as error:
                error_message = format_row_error(error, row.fields, config, *config.transforms)
    return None, error_message


def write_documents(
    directory: Path, config: DatasetConfig, tokenizer: Tokenizer, reader: RowReader, dist: DistributedContext
) -> None:
    """Write the documents of a dataset into a directory."""
    total, start_time = reader.count, time.time()
    bad_rows, hide_bar = BadRowPolicy(config, total), not dist.is_main_process or None
    bar = tqdm(total=total, desc="preprocessing", unit=" rows", disable=hide_bar, leave=False)
    with bar, TokenizedDatasetWriter(directory, describe_format(config, reader)) as writer:
        for chunk in tokenize_chunks(config, tokenizer, reader.chunks(), num_workers(config, total)):
            bad_rows.add(chunk.bad_rows, chunk.summary.rows)
            with cache.raise_disk_full(directory):
                writer.add(chunk)
            bar.update(chunk.summary.rows)
        bad_rows.check()
        if not writer.counts["documents"]:
            raise UserError(describe_unusable(config, writer.summary, bad_rows))
        with cache.raise_disk_full(directory):
            seconds = time.time() - start_time
            writer.finish(source=config.source, split=config.split, made=start_time, seconds=seconds)


def describe_unusable(config: DatasetConfig, summary: PreprocessSummary, bad_rows: "BadRowPolicy") -> str:
    """Why no row of a dataset is left: the one cause if all rows have the same, or their counts."""
    if not summary.rows:
        return f"{config.source}: split {config.split} has no rows"
    causes = (
        (summary.skipped, "all rows are invalid"),
        (summary.filtered, "`transforms` remove all rows"),
        (summary.dropped, f"all rows are longer than max_length={config.max_length:,} (`excess_length_strategy`)"),
    )
    problem = next((cause for count, cause in causes if count == summary.rows), "no row is left to train on")
    return f"{config.source}: {problem}: {summary.format('bad')}{bad_rows.example}"


def read_bad_rows(path: Path | None) -> Iterator[BadRow]:
    """Bad rows that a JSON Lines file lists; none without a file."""
    if path is not None and path.is_file():
        with path.open(encoding="utf-8") as file:
            yield from (BadRow(**json.loads(line)) for line in file)


class BadRowPolicy:
    """Raises an error for the first bad row, or counts bad rows and checks the allowed fraction."""

    def __init__(self, config: DatasetConfig, total: int | None) -> None:
        self.config, self.total = config, total
        self.num_rows = self.num_bad = 0
        self.first: BadRow | None = None

    def add(self, bad_rows: Iterable[BadRow], num_rows: int) -> None:
        """Count the bad rows among `num_rows` more rows. Raise UserError as soon as there are too many."""
        self.num_rows += num_rows
        for bad_row in bad_rows:
            if self.config.on_bad_row == "error":
                raise UserError(f"{bad_row.where}: {bad_row.reason}")
            self.num_bad, self.first = self.num_bad + 1, self.first or bad_row
        if self.total is not None and self.num_bad > self.config.max_bad_row_fraction * self.total:
            self.raise_error()

    def check(self) -> None:
        """Raise UserError if the fraction of bad rows is above the limit."""
        if self.num_bad > self.config.max_bad_row_fraction * self.num_rows:
            self.raise_error()

    @property
    def example(self) -> str:
        """First bad row, as the end of a sentence; empty if there is none."""
        return "" if self.first is None else f"; first: {self.first.where}: {self.first.reason}"

    def raise_error(self) -> None:
        """Raise UserError with the number of bad rows, and the first one."""
        raise UserError(
            f"{self.config.source}: {self.num_bad:,} of {self.num_rows:,} rows are invalid or have no target tokens "
            f"(max_bad_row_fraction={self.config.max_bad_row_fraction:g}){self.example}"
        )
