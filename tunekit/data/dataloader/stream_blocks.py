"""Streaming data: blocks of documents from sources that may be endless.

A block is a pure function of the seed, its index, and the positions of its sources, so only these are saved.
"""

import json
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tunekit.data.column_usage import ColumnReport, merge_reports
from tunekit.data.dataloader.mixture import EpochSampler, MixtureBase
from tunekit.data.dataloader.packing import PackingPlan
from tunekit.data.dataloader.sampler import plan_rows, unit_documents
from tunekit.data.dataloader.shared_prefix import dataset_row_lengths
from tunekit.data.datasets import DatasetConfig
from tunekit.data.document import Document
from tunekit.data.preprocess.preprocess import (
    BadRowPolicy,
    describe_format,
    num_workers,
    read_bad_rows,
    tokenize_chunks,
)
from tunekit.data.preprocess.tokenized_dataset import PreprocessSummary, TokenizedChunk, TokenizedDataset
from tunekit.data.readers.row_reader import FileOffset, RowChunk
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError

# Limits of a round: fewer documents if they may be so long that there would be more tokens.
ROUND_DOCUMENTS, ROUND_TOKENS = 8192, 2**25
# A block of packed rows has as many rounds as fill BLOCK_STEPS steps, each to at least MIN_STEP_FILL, or as reach
# ROUND_TOKENS tokens or BLOCK_DOCUMENTS documents.
BLOCK_STEPS, MIN_STEP_FILL, BLOCK_DOCUMENTS = 8, 0.95, 2**17
PACKED_FILL = 0.98  # fraction of packed rows that is almost always filled
MIN_CHECKED_ROWS = 5000  # rows before the fraction of bad rows is checked

LocatedDocuments = list[tuple[Document, str]]  # with the location of the row of each


class StreamPosition(NamedTuple):
    """Position in a source: completed passes, position of the current chunk, and documents of it that were used."""

    num_passes: int = 0
    chunk_position: tuple[int, ...] | None = None
    num_documents: int = 0


class DocumentFeed(ABC):
    """Endless documents, read in dataset rows of one or more documents."""

    position: StreamPosition
    description: str
    columns: tuple[ColumnReport, ...] = ()  # of the rows that were read so far

    @abstractmethod
    def seek(self, position: StreamPosition) -> None:
        """Continue from another position."""

    @abstractmethod
    def take(self, num_rows: int) -> LocatedDocuments:
        """Documents of the next dataset rows."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Hash of the rows."""

    def stop(self) -> None:  # noqa: B027 - only some feeds block
        """Make a thread that reads from this feed fail soon."""

    def close(self) -> None:  # noqa: B027
        """Stop the preprocessing workers, if any."""


class StreamFeed(DocumentFeed):
    """Documents of a source that is read repeatedly, as needed. Bad rows are listed in `bad_rows_file`."""

    def __init__(self, config: DatasetConfig, tokenizer: Tokenizer, bad_rows_file: Path | None) -> None:
        self.config, self.tokenizer, self.bad_rows_file = config, config.prepare_tokenizer(tokenizer), bad_rows_file
        self.reader = config.open_rows()
        self.description = f"{describe_format(config, self.reader)}, a stream".removeprefix(", ")
        self.bad_rows, self.listed_rows = BadRowPolicy(config, None), set[str]()
        # Resumed runs and later passes read the same rows again.
        self.listed_rows.update(bad_row.where for bad_row in read_bad_rows(bad_rows_file))
        self.stopped = False
        self.open(StreamPosition())

    def seek(self, position: StreamPosition) -> None:
        self.close()
        self.open(position)

    def open(self, position: StreamPosition) -> None:
        """Start to read from a position."""
        self.position = position
        self.pass_indices: deque[int] = deque()  # of the chunks that workers have received
        workers = num_workers(self.config, None)
        self.tokenized = tokenize_chunks(self.config, self.tokenizer, self.chunks(position), workers)
        self.documents = self.read()

    def chunks(self, position: StreamPosition) -> Iterator[RowChunk]:
        """Chunks of all passes, from a position on."""
        offset = None if position.chunk_position is None else FileOffset(*position.chunk_position)
        for pass_index in count(position.num_passes):
            has_rows = offset is not None
            for chunk in self.reader.chunks(offset):
                has_rows = True
                self.pass_indices.append(pass_index)
                yield chunk
            if not has_rows:
                raise UserError(f"{self.config.source}: split {self.config.split} has no rows")
            offset = None

    def read(self) -> Iterator[tuple[StreamPosition, Document, str]]:
        """Documents, each with the position after it and the location of its row."""
        skip, last_pass = self.position.num_documents, self.position.num_passes
        has_documents = self.position.chunk_position is not None
        for chunk in self.tokenized:
            pass_index = self.pass_indices.popleft()
            if pass_index > last_pass and not has_documents:
                is_bad = self.bad_rows.num_bad == self.bad_rows.num_rows
                problem = "all rows are invalid" if is_bad else "no row is left to train on"
                raise UserError(f"{self.config.source}: {problem}{self.bad_rows.example}")
            has_documents, last_pass = has_documents and pass_index == last_pass, pass_index
            self.record_bad_rows(chunk)
            documents = TokenizedDataset(chunk.flat)
            for i in range(skip, len(documents)):
                has_documents = True
                position = StreamPosition(pass_index, tuple(chunk.position), i + 1)
                yield position, documents[i], documents.row_location(i)
            skip = 0

    def record_bad_rows(self, chunk: TokenizedChunk) -> None:
        """Count the bad rows of a chunk and list the new ones."""
        if self.stopped:
            raise UserError("data: reading was stopped")
        self.bad_rows.add(chunk.bad_rows, chunk.summary.rows)
        self.columns = merge_reports(self.columns, chunk.summary.columns)
        if self.bad_rows.num_rows >= MIN_CHECKED_ROWS:
            self.bad_rows.check()
        new = [bad_row for bad_row in chunk.bad_rows if bad_row.where not in self.listed_rows]
        if new and self.bad_rows_file is not None:
            self.listed_rows.update(bad_row.where for bad_row in new)
            self.bad_rows_file.parent.mkdir(parents=True, exist_ok=True)
            with self.bad_rows_file.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(bad_row._asdict()) + "\n" for bad_row in new)

    def take(self, num_rows: int) -> LocatedDocuments:
        documents: LocatedDocuments = []
        for _ in range(num_rows * self.config.docs_per_row):
            self.position, document, location = next(self.documents)
            documents.append((document, location))
        return documents

    def fingerprint(self) -> str:
        return self.reader.digest()

    def stop(self) -> None:
        self.stopped = True

    def close(self) -> None:
        self.tokenized.close()


class MapFeed(DocumentFeed):
    """Documents of a preprocessed dataset, in passes that each have their own order."""

    def __init__(self, dataset: TokenizedDataset, docs_per_row: int, seed: int, shuffle: bool) -> None:
        self.dataset, self.docs_per_row = dataset, docs_per_row
        self.position, self.description = StreamPosition(), dataset.summary.row_format
        self.columns = dataset.summary.columns
        self.sampler = EpochSampler([len(dataset) // docs_per_row], [1], seed, shuffle)

    def seek(self, position: StreamPosition) -> None:
        self.position = position

    def take(self, num_rows: int) -> LocatedDocuments:
        indices: list[int] = []
        if num_rows:
            rows = self.sampler.take(0, self.position.num_documents, num_rows)
            indices = unit_documents([rows], self.docs_per_row)[0].tolist()
        self.position = StreamPosition(num_documents=self.position.num_documents + num_rows)
        return [(self.dataset[i], self.dataset.row_location(i)) for i in indices]

    def fingerprint(self) -> str:
        return self.dataset.fingerprint


class ShuffleBlock(NamedTuple):
    """Documents that are shuffled and packed together.

    `round_index` is its first round, `first_document` the stream index of its first document. `start_positions` and
    `end_positions` are those of its sources, `row_counts` the dataset rows of each source. `plan` packs dataset rows.
    """

    round_index: int
    num_rounds: int
    first_document: int
    start_positions: list[StreamPosition]
    end_positions: list[StreamPosition]
    row_counts: list[int]
    documents: TokenizedDataset
    plan: PackingPlan


class BlockStream:
    """Consecutive blocks of a mixture. Each has full rounds, with a fraction of each source that follows its weight."""

    def __init__(self, mixture: MixtureBase, feeds: Sequence[DocumentFeed], seed: int, batch_size: int) -> None:
        self.mixture, self.feeds, self.seed, self.batch_size, self.round_index = mixture, feeds, seed, batch_size, 0
        weights = np.array([1.0 if member.weight is None else member.weight for member in mixture.datasets])
        self.fractions = weights / weights.sum()
        max_rows = max(1, min(ROUND_DOCUMENTS, ROUND_TOKENS // mixture.max_length) // mixture.docs_per_row)
        self.round_size = -(-max_rows // batch_size) * batch_size  # dataset rows
        self.share_prefixes = False  # whether common prefixes of a dataset row are stored once

    def seek(self, round_index: int, positions: Sequence[StreamPosition]) -> None:
        """Start the next block with this round."""
        self.round_index = round_index
        for feed, position in zip(self.feeds, positions, strict=True):
            feed.seek(position)

    def next(self) -> ShuffleBlock:
        """Read and plan the next block."""
        round_index, start_positions = self.round_index, [feed.position for feed in self.feeds]
        sources: list[LocatedDocuments] = [[] for _ in self.feeds]
        num_documents = num_tokens = 0
        while not self.is_full(num_documents, num_tokens):
            for documents, new_documents in zip(sources, self.next_round(), strict=True):
                documents += new_documents
                num_documents += len(new_documents)
                num_tokens += sum(len(document.tokens) for document, _ in new_documents)
        located = [item for documents in sources for item in documents]
        dataset = TokenizedDataset.from_documents([item for item, _ in located], [where for _, where in located])
        dataset.summary = PreprocessSummary(columns=merge_reports(*(feed.columns for feed in self.feeds)))
        return ShuffleBlock(
            round_index=round_index,
            num_rounds=self.round_index - round_index,
            first_document=round_index * self.round_size * self.mixture.docs_per_row,
            start_positions=start_positions,
            end_positions=[feed.position for feed in self.feeds],
            row_counts=[len(documents) // self.mixture.docs_per_row for documents in sources],
            documents=dataset,
            plan=self.plan(dataset, round_index),
        )

    def next_round(self) -> list[LocatedDocuments]:
        """Documents of each source for one round. The fractions of all rounds together are exact to one dataset row."""
        bounds = [
            np.floor(self.fractions * self.round_size * (self.round_index + i) + 1e-9).astype(int) for i in (0, 1)
        ]
        self.round_index += 1
        counts = (bounds[1] - bounds[0]).tolist()
        return [feed.take(num_rows) for feed, num_rows in zip(self.feeds, counts, strict=True)]

    def is_full(self, num_documents: int, num_tokens: int) -> bool:
        """Whether these documents fill the steps of a block. Ignores shared prefixes: they must not change a block."""
        if num_documents == 0 or self.mixture.capacity is None:
            return num_documents > 0
        steps = num_tokens / (PACKED_FILL * self.mixture.capacity * self.batch_size)
        if steps < 1:
            return False
        reaches_limit = num_tokens >= ROUND_TOKENS or num_documents >= BLOCK_DOCUMENTS
        return reaches_limit or (steps >= BLOCK_STEPS and steps >= MIN_STEP_FILL * math.ceil(steps))

    def plan(self, dataset: TokenizedDataset, round_index: int) -> PackingPlan:
        """Packed rows of a block."""
        lengths, seed = self.row_lengths(dataset), (self.seed, round_index) if self.mixture.shuffle else None
        return plan_rows(lengths, np.arange(len(lengths)), self.mixture.capacity, seed)

    def row_lengths(self, dataset: TokenizedDataset) -> np.ndarray:
        """Tokens of the dataset rows of a block."""
        return dataset_row_lengths(dataset, self.mixture.docs_per_row, self.share_prefixes)

    def stop(self) -> None:
        """Make a thread that reads a block fail soon."""
        for feed in self.feeds:
            feed.stop()

    def close(self) -> None:
        """Stop the preprocessing workers of all feeds."""
        for feed in self.feeds:
            feed.close()
