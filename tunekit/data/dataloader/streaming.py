"""Step number to micro-batches of rows that are read while they are trained on, a block at a time."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from tunekit.data.dataloader import shared_prefix
from tunekit.data.dataloader.base import DataLoader
from tunekit.data.dataloader.batch import Batch, Collator
from tunekit.data.dataloader.mixture import MixtureBase
from tunekit.data.dataloader.packing import PackingPlan
from tunekit.data.dataloader.sampler import RowOrder, unit_documents, unit_lengths
from tunekit.data.dataloader.stream_blocks import BlockStream, ShuffleBlock, StreamPosition
from tunekit.data.dataloader.summary import DatasetSummary, DataSummary
from tunekit.data.preprocess.tokenized_dataset import Document, FlatDocuments
from tunekit.errors import UserError

PAST = 16  # blocks of which it is known where their documents are from: what a step does may be read late


class BlockHistory(NamedTuple):
    """A block that is or was at hand: its first step, the one behind its last, and where documents are from."""

    first: int
    behind: int
    plan: PackingPlan
    places: FlatDocuments


class StreamingDataLoader(DataLoader):
    """`streamed[step]`: the micro-batches of this rank. Steps come in turn; `restore` says from which on.

    The rows of a block are shared out evenly over its steps, so packed ones may have a few rows fewer than `batch`. The
    next block is made by a thread while this one trains. Every rank reads and prepares all rows: none waits for others.
    """

    def __init__(self, mix: MixtureBase, blocks: BlockStream, layout: Collator) -> None:
        self.mixture, self.blocks, self.collator = mix, blocks, layout
        self.vocab: int | None = None
        self.thread = ThreadPoolExecutor(1, "tunekit-stream")
        self.coming: Future[ShuffleBlock] | None = None
        self.marks: dict[
            int, tuple[int, list[StreamPosition]]
        ] = {}  # first step of a block -> its number, where sources stood
        self.first = self.behind = 0  # steps of the block at hand
        self.block = self.opening = self.blocks.next()
        self.past: tuple[BlockHistory, ...] = ()
        self.datasets = (self.block.documents,)
        self.order = RowOrder(
            unit_lengths(self.block.documents.lengths, mix.docs_per_row), blocks.seed, mix.shuffle, mix.capacity
        )
        self.begin(self.block)

    def begin(self, block: ShuffleBlock) -> None:
        """The steps of a block come next; the one behind it is made meanwhile."""
        highest = max(self.collator.pad_id, int(block.documents.tokens.max()))
        if self.vocab is not None and highest >= self.vocab:
            raise UserError(
                f"the rows hold token {highest}, the model knows {self.vocab}: this tokenizer is another model's"
            )
        self.block, self.first = block, self.behind
        self.behind += -(-len(block.plan) // self.collator.global_batch_size)
        known = self.marks | {
            self.first: (block.number, block.before),
            self.behind: (block.number + block.rounds, block.behind),
        }
        # A step that is trained may be one behind the one that is made. Another thread may be reading what was known.
        self.marks = {first: known[first] for first in sorted(known)[-3:]}
        here = BlockHistory(self.first, self.behind, block.plan, block.documents.flat.without_tokens())
        self.past = (*(past for past in self.past[1 - PAST :] if past.behind <= self.first), here)

    def __getitem__(self, step: int) -> list[Batch]:
        assert step >= self.first, "a stream does not go back"
        if self.coming is None:
            self.coming = self.thread.submit(self.blocks.next)
        while step >= self.behind:
            self.begin(self.coming.result())
            self.coming = self.thread.submit(self.blocks.next)
        rows = self.numbers(self.past[-1], step)
        return self.collator.micro_batches(self.block.documents, rows, self.block.first)

    def row_locations(self, step: int) -> list[str]:
        """Where the rows of a step are from; nothing if that is no longer known."""
        past = next((past for past in self.past if past.first <= step < past.behind), None)
        if past is None:
            return []
        return [past.places.row_location(int(number)) for row in self.numbers(past, step) for number in row]

    def numbers(self, past: BlockHistory, step: int) -> list[np.ndarray]:
        """The documents of each row of one of the steps that share a block."""
        rows, at, steps = len(past.plan), step - past.first, past.behind - past.first
        return unit_documents(past.plan.rows(rows * at // steps, rows * (at + 1) // steps), self.mixture.docs_per_row)

    def replan(self) -> None:
        self.blocks.shared, block = True, self.block
        self.opening = block._replace(plan=self.blocks.plan(block.documents, block.number))
        self.order = self.order.shortened(
            shared_prefix.shared_prefix_tokens(block.documents, self.mixture.docs_per_row)
        )
        self.behind = self.first
        self.begin(self.opening)

    def check_vocab(self, vocab: int) -> None:
        """UserError, now or when such a block comes, if the model has no embedding for a token."""
        self.vocab, self.behind = vocab, self.first
        self.begin(self.block)

    def num_steps(self, epochs: int) -> int:
        raise UserError("data: nobody knows how many steps a stream has: set `max_steps`")

    def state_dict(self, step: int) -> dict[str, Any]:
        """Where the sources stood when the block of a step began, and which of its steps comes next."""
        first = max(mark for mark in self.marks if mark <= step)
        number, marks = self.marks[first]
        kept = [[mark.passed, None if mark.place is None else list(mark.place), mark.taken] for mark in marks]
        return {"block": number, "first": first, "marks": kept, "rows": self.digests}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["rows"] != self.digests:
            raise UserError("data: these are not the rows that the run began with: bring them back, or use --overwrite")
        if self.coming is not None:
            self.coming.result()
        marks = [
            StreamPosition(passed, None if place is None else tuple(place), taken)
            for passed, place, taken in state["marks"]
        ]
        self.blocks.seek(state["block"], marks)
        self.coming, self.marks, self.behind = None, {}, state["first"]
        self.begin(self.blocks.next())

    @property
    def fingerprint(self) -> str:
        return " ".join(self.digests)

    @property
    def digests(self) -> list[str]:
        """What the sources are."""
        return [feed.digest() for feed in self.blocks.feeds]

    def close(self) -> None:
        """The thread and the processes that prepare rows end."""
        self.blocks.stop()
        self.thread.shutdown(wait=True, cancel_futures=True)
        self.blocks.close()

    def sample_documents(self, count: int) -> list[tuple[str, Document]]:
        """Some documents of the first step, and where they are from."""
        numbers = unit_documents([self.opening.plan.documents], self.mixture.docs_per_row)[0][:count].tolist()
        return [(self.opening.documents.row_location(number), self.opening.documents[number]) for number in numbers]

    @property
    def summary(self) -> DataSummary:
        """What the first block holds."""
        found, shares, first = self.opening.documents, [], 0
        for rows, feed, count in zip(self.mixture.dataset_configs, self.blocks.feeds, self.opening.counts, strict=True):
            part = slice(first, first := first + count)
            begin, end = (found.bounds[at * self.mixture.docs_per_row] for at in (part.start, part.stop))
            tokens, learnt = int(self.order.lengths[part].sum()), int(found.learnt[begin:end].sum())
            shares.append(DatasetSummary(rows.source, feed.about, count, tokens, learnt, 0.0))
        packed = None if self.mixture.capacity is None else len(self.opening.plan)
        longest = int(found.lengths.max())
        return DataSummary(tuple(shares), longest, found.truncated, packed, self.mixture.capacity, is_streaming=True)
