"""Rows that are read while they are trained on: blocks of documents, from sources that may have no end.

A block is a pure function of the seed, of its number and of where its sources stood, so that is all that must be kept.
"""

import json
import math
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from tunekit.data.dataloader import shared_prefix
from tunekit.data.dataloader.mixture import EpochSampler, MixtureBase
from tunekit.data.dataloader.packing import PackingPlan
from tunekit.data.dataloader.sampler import plan_rows, unit_documents, unit_lengths
from tunekit.data.datasets import DatasetConfig
from tunekit.data.preprocess.preprocess import (
    BadRowPolicy,
    describe_format,
    num_workers,
    read_bad_rows,
    tokenize_chunks,
)
from tunekit.data.preprocess.tokenized_dataset import Document, TokenizedChunk, TokenizedDataset
from tunekit.data.readers.open_dataset import open_dataset
from tunekit.data.readers.row_reader import BadRow, FileOffset, RowChunk
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError

DOCUMENTS, TOKENS = 8192, 2**25  # in a round; fewer where documents may be so long that these would be more tokens
# A block of packed rows is so many rounds that it fills this many steps, none of them below such a share, or until it
# holds as many tokens as a round may, or so many documents.
STEPS, FULL, MANY = 8, 0.95, 2**17
DENSE = 0.98  # of packed rows that is filled, at least and nearly always
SURE = 5000  # rows from which on a share of bad ones says something

Taken = list[tuple[Document, str]]  # with the place of its row


class StreamPosition(NamedTuple):
    """Where a source stands: passes behind it, the chunk that is read, and documents of it that are taken."""

    passed: int = 0
    place: tuple[int, ...] | None = None
    taken: int = 0


class DocumentFeed(Protocol):
    """Documents without end; they are taken in units, which nothing tears."""

    mark: StreamPosition
    about: str

    def seek(self, mark: StreamPosition) -> None: ...

    def take(self, count: int) -> Taken: ...

    def digest(self) -> str: ...

    def stop(self) -> None: ...

    def close(self) -> None: ...


class StreamFeed:
    """Documents of a source that is read again and again, as they are needed. `bad_rows` lists those that are none."""

    def __init__(self, rows: DatasetConfig, tokenizer: Tokenizer, bad_rows: Path | None) -> None:
        self.rows, self.tokenizer, self.bad_rows = rows, rows.prepare_tokenizer(tokenizer), bad_rows
        self.table = open_dataset(rows.source, rows.split, rows.max_samples, streaming=True)
        self.about = f"{describe_format(rows, self.table)}, a stream".removeprefix(", ")
        self.bad, self.listed = BadRowPolicy(rows, None), known(bad_rows)
        self.closed = False
        self.begin(StreamPosition())

    def seek(self, mark: StreamPosition) -> None:
        self.close()
        self.begin(mark)

    def begin(self, mark: StreamPosition) -> None:
        """Go on from there."""
        self.mark = mark
        self.passes: deque[int] = deque()  # of each chunk that was handed out
        self.parts = tokenize_chunks(self.rows, self.tokenizer, self.chunks(mark), num_workers(self.rows, None))
        self.documents = self.read()

    def chunks(self, mark: StreamPosition) -> Iterator[RowChunk]:
        """Pass after pass, the first from a mark on."""
        place = None if mark.place is None else FileOffset(*mark.place)
        for number in count(mark.passed):
            found = place is not None
            for chunk in self.table.chunks(place):
                found = True
                self.passes.append(number)
                yield chunk
            if not found:
                raise UserError(f"{self.rows.source}: {self.rows.split} holds no row")
            place = None

    def read(self) -> Iterator[tuple[StreamPosition, Document, str]]:
        """Documents, each with the mark behind it."""
        skip, last, some = self.mark.taken, self.mark.passed, self.mark.place is not None
        for part in self.parts:
            number = self.passes.popleft()
            if number > last and not some:
                told = f"nothing is left to learn from in any of its rows{self.bad.example}"
                raise UserError(f"{self.rows.source}: {told}")
            some, last = some and number == last, number
            self.note(part)
            documents = part.documents
            for index in range(skip, len(documents)):
                some = True
                yield (
                    StreamPosition(number, tuple(part.position), index + 1),
                    documents[index],
                    documents.row_location(index),
                )
            skip = 0

    def note(self, part: TokenizedChunk) -> None:
        """Count the rows of a part that are bad, and list them."""
        if self.closed:
            raise UserError("the reading of rows was ended")
        self.bad.add(part.bad_rows, part.rows)
        if self.bad.read >= SURE:
            self.bad.check()
        new = [fault for fault in part.bad_rows if fault.where not in self.listed]
        if new and self.bad_rows is not None:
            self.listed.update(fault.where for fault in new)
            add(new, self.bad_rows)

    def take(self, count: int) -> Taken:
        """The documents of the next units."""
        found: Taken = []
        for _ in range(count * self.rows.docs_per_row):
            self.mark, document, where = next(self.documents)
            found.append((document, where))
        return found

    def digest(self) -> str:
        return self.table.digest()

    def stop(self) -> None:
        """Whoever is reading in another thread is to end soon."""
        self.closed = True

    def close(self) -> None:
        """Nobody reads any more: the processes that prepare rows end."""
        self.parts.close()


class MapFeed:
    """Documents that are prepared already, in passes of an order of their own each."""

    def __init__(self, found: TokenizedDataset, each: int, seed: int, shuffle: bool) -> None:
        self.documents, self.each, self.mark, self.about = found, each, StreamPosition(), found.prepared.row_format
        self.draw = EpochSampler([len(found) // each], [1], seed, shuffle)

    def seek(self, mark: StreamPosition) -> None:
        self.mark = mark

    def take(self, count: int) -> Taken:
        """The documents of the next units."""
        numbers = unit_documents([self.draw.some(0, self.mark.taken, count)], self.each)[0].tolist() if count else []
        self.mark = StreamPosition(taken=self.mark.taken + count)
        return [(self.documents[number], self.documents.row_location(number)) for number in numbers]

    def digest(self) -> str:
        return self.documents.fingerprint

    def stop(self) -> None:
        """It is soon done."""

    def close(self) -> None:
        """Nothing is under way."""


class ShuffleBlock(NamedTuple):
    """Documents that are shuffled and packed within themselves, how many units of each source, and where these stood.

    `number` is that of its first round, `first` that of its first document; the plan is one of units.
    """

    number: int
    rounds: int
    first: int
    before: list[StreamPosition]
    behind: list[StreamPosition]
    counts: list[int]
    documents: TokenizedDataset
    plan: PackingPlan


class BlockStream:
    """Blocks of a mix, one after the other, each of whole rounds; of each source as much as its share says."""

    def __init__(self, mix: MixtureBase, feeds: Sequence[DocumentFeed], seed: int, batch: int) -> None:
        self.mix, self.feeds, self.seed, self.batch, self.number = mix, feeds, seed, batch, 0
        weights = np.array([1.0 if part.weight is None else part.weight for part in mix.datasets])
        self.shares = weights / weights.sum()
        most = max(1, min(DOCUMENTS, TOKENS // mix.max_length) // mix.docs_per_row)
        self.size = -(-most // batch) * batch  # units in a round
        self.shared = False  # whether documents of a unit that begin alike take less room

    def seek(self, number: int, marks: Sequence[StreamPosition]) -> None:
        """The next block begins with this round."""
        self.number = number
        for feed, mark in zip(self.feeds, marks, strict=True):
            feed.seek(mark)

    def next(self) -> ShuffleBlock:
        number, before = self.number, [feed.mark for feed in self.feeds]
        taken: list[Taken] = [[] for _ in self.feeds]
        while not self.enough(taken):
            for part, more in zip(taken, self.round(), strict=True):
                part += more
        every = [one for part in taken for one in part]
        found = TokenizedDataset([document for document, _ in every], [where for _, where in every])
        counts = [len(part) // self.mix.docs_per_row for part in taken]
        behind = [feed.mark for feed in self.feeds]
        return ShuffleBlock(
            number=number,
            rounds=self.number - number,
            first=number * self.size * self.mix.docs_per_row,
            before=before,
            behind=behind,
            counts=counts,
            documents=found,
            plan=self.plan(found, number),
        )

    def round(self) -> list[Taken]:
        """Documents of each source. Shares of all rounds together are kept to a unit, however small one round is."""
        bounds = [np.floor(self.shares * self.size * (self.number + more) + 1e-9).astype(int) for more in (0, 1)]
        self.number += 1
        return [feed.take(units) for feed, units in zip(self.feeds, (bounds[1] - bounds[0]).tolist(), strict=True)]

    def enough(self, taken: Sequence[Taken]) -> bool:
        """Whether steps are as full as they can be. Rows are counted by their tokens alone: a block must be the same
        whether what documents share takes room or not."""
        count = sum(map(len, taken))
        if count == 0 or self.mix.capacity is None:
            return count > 0
        tokens = sum(len(document.tokens) for part in taken for document, _ in part)
        steps = tokens / (DENSE * self.mix.capacity * self.batch)
        if steps < 1:
            return False
        most = tokens >= TOKENS or count >= MANY
        return most or (steps >= STEPS and steps >= FULL * math.ceil(steps))

    def plan(self, found: TokenizedDataset, number: int) -> PackingPlan:
        """Which of the documents of a block share a row."""
        lengths, seed = (
            unit_lengths(found.lengths, self.mix.docs_per_row),
            (self.seed, number) if self.mix.shuffle else None,
        )
        lengths = lengths - shared_prefix.shared_prefix_tokens(found, self.mix.docs_per_row) if self.shared else lengths
        return plan_rows(lengths, np.arange(len(lengths)), self.mix.capacity, seed)

    def stop(self) -> None:
        for feed in self.feeds:
            feed.stop()

    def close(self) -> None:
        for feed in self.feeds:
            feed.close()


def known(file: Path | None) -> set[str]:
    """Places of rows that are listed already: a run that goes on, and every other pass, come by them again."""
    return set() if file is None or not file.is_file() else {fault.where for fault in read_bad_rows(file)}


def add(faults: Sequence[BadRow], file: Path) -> None:
    """Put rows that are skipped into a list."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.writelines(json.dumps(fault._asdict()) + "\n" for fault in faults)
