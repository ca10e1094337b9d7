"""From rows to documents: what is kept from before, else all of it anew, by as many processes as there are cores."""

import json
import re
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from tqdm import tqdm

from tunekit.data.datasets import DatasetConfig
from tunekit.data.preprocess import cache, user_modules, worker, worker_pool
from tunekit.data.preprocess.fingerprint import fingerprint
from tunekit.data.preprocess.tokenized_dataset import TokenizedChunk, TokenizedDataset, TokenizedDatasetWriter
from tunekit.data.readers.open_dataset import open_dataset
from tunekit.data.readers.row_reader import CHUNK_ROWS, BadRow, Row, RowChunk, RowReader
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError

FEW = 2_000  # rows that are done before processes have started
FIRST = 100  # rows that are asked what they are
NUMBER = re.compile(r"\d[\d,.]*")
REASONS = 1_000  # kinds of faults that are counted apart


def preprocess_dataset(rows: DatasetConfig, tokenizer: Tokenizer, run) -> TokenizedDataset:
    """All rows as documents, mapped; UserError names the first that cannot be learnt from. Rank 0 shows a bar."""
    tokenizer = rows.prepare_tokenizer(tokenizer)
    table = open_dataset(rows.source, rows.split, rows.max_samples)
    found = cache.get_or_build(
        fingerprint(rows, tokenizer, table), PreprocessJob(rows, tokenizer, table, run), run.tell
    )
    if found.prepared.bad_rows is not None:  # it may have been prepared for who allowed more of them
        bad = BadRowPolicy(rows, None)
        bad.add(read_bad_rows(found.prepared.bad_rows), found.prepared.rows)
        bad.check()
    return found


def tokenize_chunks(
    rows: DatasetConfig, tokenizer: Tokenizer, chunks: Iterable[RowChunk], workers: int
) -> Generator[TokenizedChunk, None, None]:
    """What chunks become, in their order, by processes of their own or, with 0, in this one.

    `tokenizer` is what `rows.prepare` gave.
    """
    if workers == 0:
        yield from (worker.tokenize_chunk(rows, tokenizer, chunk) for chunk in chunks)
        return
    with worker_pool.WorkerPool(rows, tokenizer, chunks, workers) as answers:
        yield from answers


def num_workers(rows: DatasetConfig, count: int | None) -> int:
    """Processes for `count` rows (None: nobody knows how many): a core each, none where starting them takes longer."""
    if any(
        module.name == "__main__" for module in user_modules.user_modules(rows)
    ):  # a notebook's own classes are nowhere else
        return 0
    if rows.num_proc is not None:
        return rows.num_proc
    found = min(worker_pool.num_cpus(), worker_pool.MOST)
    if count is not None:
        found = min(found, -(-count // CHUNK_ROWS)) if count >= FEW else 0
    return 0 if found == 1 else found


def describe_format(rows: DatasetConfig, table: RowReader) -> str:
    """What the rows are, in words, as the first that can be read says."""
    for row in islice(table.rows, FIRST):
        with suppress(UserError):  # which is told where rows are prepared
            fields = rows.transform(row.fields) if isinstance(row, Row) else None
            if fields is not None:
                return rows.describe(fields)
    return ""


class PreprocessJob:
    """Writes the documents of a table into a folder."""

    def __init__(self, rows: DatasetConfig, tokenizer: Tokenizer, table: RowReader, run) -> None:
        self.rows, self.tokenizer, self.table, self.run = rows, tokenizer, table, run

    def __call__(self, folder: Path) -> None:
        rows, total, began = self.rows, self.table.count, time.time()
        bad = BadRowPolicy(rows, total)
        bar = tqdm(total=total, desc="preparing", unit=" rows", disable=not self.run.is_main or None, leave=False)
        with bar, TokenizedDatasetWriter(folder, describe_format(rows, self.table)) as writer:
            for part in tokenize_chunks(rows, self.tokenizer, self.table.chunks(), num_workers(rows, total)):
                bad.add(part.bad_rows, part.rows)
                with cache.raise_disk_full(folder, lambda: wanted(writer, total)):
                    writer.add(part)
                bar.update(part.rows)
            bad.check()
            if not writer.counts["documents"]:
                told = writer.prepared.format("bad")
                raise UserError(f"{rows.source}: nothing is left to learn from: {told}{bad.example}")
            with cache.raise_disk_full(folder):
                writer.finish(source=rows.source, split=rows.split, made=began, seconds=time.time() - began)


def wanted(writer: TokenizedDatasetWriter, total: int | None) -> float | None:
    """Bytes that all rows would take, by those that are written."""
    done = writer.prepared.rows
    return None if total is None or not done else writer.size / done * total


def read_bad_rows(file: Path) -> Iterator[BadRow]:
    """The rows of a list of bad ones."""
    with file.open(encoding="utf-8") as lines:
        yield from (BadRow(**json.loads(line)) for line in lines)


class BadRowPolicy:
    """Rows that cannot be learnt from: the first in the order of the rows is told, or all are counted up to a share."""

    def __init__(self, rows: DatasetConfig, total: int | None) -> None:
        self.rows, self.total = rows, total
        self.read = self.count = 0
        self.first: BadRow | None = None
        self.reasons: Counter[str] = Counter()

    def add(self, faults: Iterable[BadRow], rows: int) -> None:
        """Some of these `rows`. UserError as soon as it is sure that there are too many."""
        self.read += rows
        for fault in faults:
            if self.rows.on_bad_row == "error":
                raise UserError(f"{fault.where}: {fault.reason}")
            kind = NUMBER.sub("N", fault.reason)
            self.reasons[kind if kind in self.reasons or len(self.reasons) < REASONS else "others"] += 1
            self.count, self.first = self.count + 1, self.first or fault
        if self.total is not None and self.count > self.rows.max_bad_row_fraction * self.total:
            self.refuse()

    def check(self) -> None:
        """UserError if they are more than the share that is allowed."""
        if self.count > self.rows.max_bad_row_fraction * self.read:
            self.refuse()

    @property
    def example(self) -> str:
        """The first of them, at the end of a sentence."""
        return "" if self.first is None else f"; the first is {self.first.where}: {self.first.reason}"

    def refuse(self) -> None:
        common = "; ".join(f"{count:,} times: {reason}" for reason, count in self.reasons.most_common(3))
        raise UserError(
            f"{self.rows.source}: {self.count:,} of {self.read:,} rows cannot be learnt from, and "
            "`max_bad_row_fraction` allows "
            f"{self.rows.max_bad_row_fraction:.2%}; {common} (the first is "
            f"{self.first.where if self.first else 'unknown'})"
        )
