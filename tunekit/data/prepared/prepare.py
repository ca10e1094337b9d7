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

from tunekit.data.prepared import cache, own, pool, worker
from tunekit.data.prepared.documents import Documents, Tokenised, Writer
from tunekit.data.prepared.key import key
from tunekit.data.rows import Rows
from tunekit.data.sources.source import open_source
from tunekit.data.sources.table import ROWS, Chunk, Fault, Row, Table
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError

FEW = 2_000  # rows that are done before processes have started
FIRST = 100  # rows that are asked what they are
NUMBER = re.compile(r"\d[\d,.]*")
REASONS = 1_000  # kinds of faults that are counted apart


def documents(rows: Rows, tokenizer: Tokenizer, run) -> Documents:
    """All rows as documents, mapped; UserError names the first that cannot be learnt from. Rank 0 shows a bar."""
    tokenizer = rows.prepare(tokenizer)
    table = open_source(rows.source, rows.split, rows.limit)
    found = cache.obtain(key(rows, tokenizer, table), Making(rows, tokenizer, table, run), run.tell)
    if found.prepared.bad_rows is not None:  # it may have been prepared for who allowed more of them
        bad = Bad(rows, None)
        bad.add(listed(found.prepared.bad_rows), found.prepared.rows)
        bad.check()
    return found


def tokenised(
    rows: Rows, tokenizer: Tokenizer, chunks: Iterable[Chunk], workers: int
) -> Generator[Tokenised, None, None]:
    """What chunks become, in their order, by processes of their own or, with 0, in this one.

    `tokenizer` is what `rows.prepare` gave.
    """
    if workers == 0:
        yield from (worker.tokens(rows, tokenizer, chunk) for chunk in chunks)
        return
    with pool.Pool(rows, tokenizer, chunks, workers) as answers:
        yield from answers


def workers(rows: Rows, count: int | None) -> int:
    """Processes for `count` rows (None: nobody knows how many): a core each, none where starting them takes longer."""
    if any(module.name == "__main__" for module in own.modules(rows)):  # a notebook's own classes are nowhere else
        return 0
    if rows.workers is not None:
        return rows.workers
    found = min(pool.cores(), pool.MOST)
    if count is not None:
        found = min(found, -(-count // ROWS)) if count >= FEW else 0
    return 0 if found == 1 else found


def form(rows: Rows, table: Table) -> str:
    """What the rows are, in words, as the first that can be read says."""
    for row in islice(table.rows, FIRST):
        with suppress(UserError):  # which is told where rows are prepared
            fields = rows.transformed(row.fields) if isinstance(row, Row) else None
            if fields is not None:
                return rows.says(fields)
    return ""


class Making:
    """Writes the documents of a table into a folder."""

    def __init__(self, rows: Rows, tokenizer: Tokenizer, table: Table, run) -> None:
        self.rows, self.tokenizer, self.table, self.run = rows, tokenizer, table, run

    def __call__(self, folder: Path) -> None:
        rows, total, began = self.rows, self.table.count, time.time()
        bad = Bad(rows, total)
        bar = tqdm(total=total, desc="preparing", unit=" rows", disable=not self.run.is_main or None, leave=False)
        with bar, Writer(folder, form(rows, self.table)) as writer:
            for part in tokenised(rows, self.tokenizer, self.table.chunks(), workers(rows, total)):
                bad.add(part.faults, part.rows)
                with cache.told(folder, lambda: wanted(writer, total)):
                    writer.add(part)
                bar.update(part.rows)
            bad.check()
            if not writer.counts["documents"]:
                told = writer.prepared.told("bad")
                raise UserError(f"{rows.source}: nothing is left to learn from: {told}{bad.example}")
            with cache.told(folder):
                writer.finish(source=rows.source, split=rows.split, made=began, seconds=time.time() - began)


def wanted(writer: Writer, total: int | None) -> float | None:
    """Bytes that all rows would take, by those that are written."""
    done = writer.prepared.rows
    return None if total is None or not done else writer.size / done * total


def listed(file: Path) -> Iterator[Fault]:
    """The rows of a list of bad ones."""
    with file.open(encoding="utf-8") as lines:
        yield from (Fault(**json.loads(line)) for line in lines)


class Bad:
    """Rows that cannot be learnt from: the first in the order of the rows is told, or all are counted up to a share."""

    def __init__(self, rows: Rows, total: int | None) -> None:
        self.rows, self.total = rows, total
        self.read = self.count = 0
        self.first: Fault | None = None
        self.reasons: Counter[str] = Counter()

    def add(self, faults: Iterable[Fault], rows: int) -> None:
        """Some of these `rows`. UserError as soon as it is sure that there are too many."""
        self.read += rows
        for fault in faults:
            if self.rows.bad_rows == "stop":
                raise UserError(f"{fault.where}: {fault.reason}")
            kind = NUMBER.sub("N", fault.reason)
            self.reasons[kind if kind in self.reasons or len(self.reasons) < REASONS else "others"] += 1
            self.count, self.first = self.count + 1, self.first or fault
        if self.total is not None and self.count > self.rows.most_bad * self.total:
            self.refuse()

    def check(self) -> None:
        """UserError if they are more than the share that is allowed."""
        if self.count > self.rows.most_bad * self.read:
            self.refuse()

    @property
    def example(self) -> str:
        """The first of them, at the end of a sentence."""
        return "" if self.first is None else f"; the first is {self.first.where}: {self.first.reason}"

    def refuse(self) -> None:
        common = "; ".join(f"{count:,} times: {reason}" for reason, count in self.reasons.most_common(3))
        raise UserError(
            f"{self.rows.source}: {self.count:,} of {self.read:,} rows cannot be learnt from, and `most_bad` allows "
            f"{self.rows.most_bad:.2%}; {common} (the first is {self.first.where if self.first else 'unknown'})"
        )
