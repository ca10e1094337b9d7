"""Data loader of rows that are read during training, one block at a time."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from tunekit.data.dataloader.base import DataLoader
from tunekit.data.dataloader.batch import Batch, Collator
from tunekit.data.dataloader.mixture import MixtureBase
from tunekit.data.dataloader.packing import PackingPlan
from tunekit.data.dataloader.sampler import unit_documents
from tunekit.data.dataloader.stream_blocks import BlockStream, ShuffleBlock, StreamPosition
from tunekit.data.dataloader.summary import DatasetSummary, DataSummary
from tunekit.data.document import Document
from tunekit.data.preprocess.tokenized_dataset import FlatDocuments, TokenizedDataset
from tunekit.errors import UserError

MAX_HISTORY = 16  # blocks whose start and row locations are kept, for metrics that are read some steps later
BlockStart = tuple[int, list[StreamPosition]]  # round index, and the positions of the sources


class BlockHistory(NamedTuple):
    """A current or past block: its first step, the step after its last, its start and that of the next block.

    `plan` and `locations` give the documents of each step, and the locations of their rows.
    """

    first_step: int
    end_step: int
    start: BlockStart
    next_start: BlockStart
    plan: PackingPlan
    locations: FlatDocuments


class StreamingDataLoader(DataLoader):
    """Data loader whose steps must be read in order, from 0 or from a loaded state.

    The rows of a block are split evenly over its steps, so steps of packed rows may have slightly fewer rows than the
    batch size. A thread reads the next block while the current one is used. Each rank reads and tokenizes all rows, so
    that ranks do not wait for each other.
    """

    def __init__(self, mixture: MixtureBase, blocks: BlockStream, collator: Collator) -> None:
        self.mixture, self.blocks, self.collator = mixture, blocks, collator
        self.checks: list[Callable[[TokenizedDataset], None]] = []
        self.thread = ThreadPoolExecutor(1, "tunekit-stream")
        self.next_block: Future[ShuffleBlock] | None = None
        self.block = self.first_block = self.blocks.next()
        self.history: tuple[BlockHistory, ...] = ()  # up to the current block
        self.datasets = (self.block.documents,)
        self.start_block(self.block, 0)

    def start_block(self, block: ShuffleBlock, first_step: int) -> None:
        """Make a block the current one. Raise UserError if a check fails."""
        for check in self.checks:
            check(block.documents)
        self.block = block
        end_step = first_step + -(-len(block.plan) // self.collator.global_batch_size)
        starts = (block.round_index, block.start_positions), (block.round_index + block.num_rounds, block.end_positions)
        current = BlockHistory(first_step, end_step, *starts, block.plan, block.documents.flat.without_tokens())
        # The tuple is replaced, not changed, because another thread may be reading it.
        past = (block for block in self.history[1 - MAX_HISTORY :] if block.end_step <= first_step)
        self.history = (*past, current)

    def __getitem__(self, step: int) -> list[Batch]:
        assert step >= self.history[-1].first_step, "steps of a stream must be read in order"
        if self.next_block is None:
            self.next_block = self.thread.submit(self.blocks.next)
        while step >= (end_step := self.history[-1].end_step):
            self.start_block(self.next_block.result(), end_step)
            self.next_block = self.thread.submit(self.blocks.next)
        rows = self.document_indices(self.history[-1], step)
        return self.collator.micro_batches(self.block.documents, rows, self.block.first_document)

    def row_locations(self, step: int) -> list[str]:
        """File and row of each document of a step; empty if its block is no longer in the history."""
        block = next((block for block in self.history if block.first_step <= step < block.end_step), None)
        if block is None:
            return []
        return [block.locations.row_location(int(i)) for row in self.document_indices(block, step) for i in row]

    def document_indices(self, block: BlockHistory, step: int) -> list[np.ndarray]:
        """Document indices of each row of a step, in the block that contains the step."""
        num_rows, index, steps = len(block.plan), step - block.first_step, block.end_step - block.first_step
        rows = block.plan.rows(num_rows * index // steps, num_rows * (index + 1) // steps)
        return unit_documents(rows, self.mixture.docs_per_row)

    def plan_rows(self) -> None:
        self.blocks.share_prefixes, block = self.collator.share_prefixes, self.block
        self.first_block = block._replace(plan=self.blocks.plan(block.documents, block.round_index))
        self.start_block(self.first_block, self.history[-1].first_step)

    @property
    def first_plan(self) -> PackingPlan:
        return self.first_block.plan

    def add_check(self, check: Callable[[TokenizedDataset], None]) -> None:
        super().add_check(check)
        self.checks.append(check)

    def num_steps(self, epochs: int) -> int:
        raise UserError("data: the number of steps of a stream is unknown. Set max_steps.")

    def state_dict(self, step: int) -> dict[str, Any]:
        """Round index, source positions, and first step of the block that contains `step`."""
        # The trained step may precede the step that is built, which may be in the next block.
        block = [block for block in self.history if block.first_step <= step][-1]
        is_next = step >= block.end_step
        first_step = block.end_step if is_next else block.first_step
        round_index, positions = block.next_start if is_next else block.start
        marks = [[num_passes, chunk and list(chunk), num_documents] for num_passes, chunk, num_documents in positions]
        return {"block": round_index, "first": first_step, "marks": marks, "rows": self.source_fingerprints}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_same_data(state["rows"], self.source_fingerprints)
        if self.next_block is not None:
            self.next_block.result()
        positions = [StreamPosition(passes, chunk and tuple(chunk), count) for passes, chunk, count in state["marks"]]
        self.blocks.seek(state["block"], positions)
        self.next_block = None
        self.start_block(self.blocks.next(), state["first"])

    @property
    def fingerprint(self) -> str:
        return " ".join(self.source_fingerprints)

    @property
    def source_fingerprints(self) -> list[str]:
        """Hashes of the sources."""
        return [feed.fingerprint() for feed in self.blocks.feeds]

    def close(self) -> None:
        """Stop the thread and the preprocessing workers."""
        self.blocks.stop()
        self.thread.shutdown(wait=True, cancel_futures=True)
        self.blocks.close()

    def sample_documents(self, count: int) -> list[tuple[str, Document]]:
        block = self.first_block
        indices = unit_documents([block.plan.documents], self.mixture.docs_per_row)[0][:count].tolist()
        return [(block.documents.row_location(i), block.documents[i]) for i in indices]

    @property
    def summary(self) -> DataSummary:
        documents, summaries, first = self.first_block.documents, [], 0
        lengths = self.blocks.row_lengths(documents)
        columns = zip(self.mixture.dataset_configs, self.blocks.feeds, self.first_block.row_counts, strict=True)
        for config, feed, count in columns:
            rows = slice(first, first := first + count)
            start, end = (documents.bounds[row * self.mixture.docs_per_row] for row in (rows.start, rows.stop))
            tokens, num_targets = int(lengths[rows].sum()), int(documents.loss_mask[start:end].sum())
            summaries.append(DatasetSummary(config.source, feed.description, count, tokens, num_targets, 0.0))
        num_packed_rows = None if self.mixture.capacity is None else len(self.first_block.plan)
        return DataSummary(
            tuple(summaries),
            int(documents.lengths.max()),
            documents.num_truncated,
            num_packed_rows,
            self.mixture.capacity,
            is_streaming=True,
        )
