"""Step number to micro-batches of rows that are prepared: the same rows whatever the ranks and the micro-batch."""

from typing import Any

import numpy as np

from tunekit.data.dataloader import shared_prefix
from tunekit.data.dataloader.base import DataLoader
from tunekit.data.dataloader.batch import Batch, Collator
from tunekit.data.dataloader.mixture import ConcatDataset, EpochSampler, MixtureBase
from tunekit.data.dataloader.sampler import RowOrder, StepIndex, unit_documents, unit_lengths
from tunekit.data.dataloader.summary import DatasetSummary, DataSummary
from tunekit.data.preprocess.tokenized_dataset import Document, PreprocessSummary, TokenizedDataset
from tunekit.errors import UserError


class MapDataLoader(DataLoader):
    """Steps go on over epochs; the last of an epoch may be smaller. There is no state: `[step]` is a pure function.

    `rows` are the documents of all parts, numbered through; `mix.each` of them that follow each other are never torn.
    """

    def __init__(self, mix: MixtureBase, parts: tuple[TokenizedDataset, ...], layout: Collator, seed: int) -> None:
        assert layout.global_batch_size > 0 and layout.micro_batch_size > 0
        self.mixture, self.datasets, self.collator = mix, parts, layout
        self.rows: TokenizedDataset | ConcatDataset = parts[0] if len(parts) == 1 else ConcatDataset(parts)
        for rows, part in zip(mix.dataset_configs, parts, strict=True):
            if not len(part):
                raise UserError(f"{rows.source}: {rows.split} holds no row to learn from")
        self.sizes = sizes = [len(part) // mix.docs_per_row for part in parts]
        self.counts = list(mix.rows_per_epoch(sizes))
        draw = None if self.counts == sizes else EpochSampler(sizes, self.counts, seed, mix.shuffle)
        self.order = RowOrder(unit_lengths(self.rows.lengths, mix.docs_per_row), seed, mix.shuffle, mix.capacity, draw)
        self.place = StepIndex(self.order.rows, layout.global_batch_size)

    def replan(self) -> None:
        self.order = self.order.shortened(shared_prefix.shared_prefix_tokens(self.rows, self.mixture.docs_per_row))
        self.place = StepIndex(self.order.rows, self.collator.global_batch_size)

    def num_steps(self, epochs: int) -> int:
        """How many steps so many epochs have."""
        return self.place.until(epochs)

    def check_vocab(self, vocab: int) -> None:
        """UserError if the model has no embedding for a token."""
        highest = max(self.collator.pad_id, *(int(part.tokens.max()) for part in self.datasets))
        if highest >= vocab:
            raise UserError(
                f"the rows hold token {highest}, the model knows {vocab}: this tokenizer is another model's"
            )

    @property
    def fingerprint(self) -> str:
        """Of all that is prepared."""
        return self.rows.fingerprint

    def sample_documents(self, count: int) -> list[tuple[str, Document]]:
        """Some documents of the first step, and where they are from."""
        numbers = [int(number) for row in self.numbers(0) for number in row][:count]
        return [(self.rows.row_location(number), self.rows[number]) for number in numbers]

    def state_dict(self, step: int) -> dict[str, Any]:
        """What the rows are, so that a run does not go on with others. Everything else follows from the step."""
        return {"rows": self.rows.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state != self.state_dict(0):
            raise UserError("data: these are not the rows that the run began with: bring them back, or use --overwrite")

    def close(self) -> None:
        """Nothing is under way."""

    @property
    def summary(self) -> DataSummary:
        """What an epoch holds."""
        drawn = self.order.drawn(0)
        part_of = np.repeat(np.arange(len(self.datasets)), self.sizes)[drawn]
        tokens = np.bincount(part_of, self.order.lengths[drawn], len(self.datasets)).astype(int).tolist()
        columns = zip(self.mixture.dataset_configs, self.datasets, self.sizes, self.counts, tokens, strict=True)
        shares = [
            DatasetSummary(
                name=rows.source,
                description=describe_rows(part, count == size),
                rows=count,
                tokens=each,
                num_target_tokens=num_target_tokens(part, count / size),
                passes=count / size,
                noun="document" if part.prepared.split else "row",
            )
            for rows, part, size, count, each in columns
        ]
        packed = None if self.mixture.capacity is None else self.order.rows(0)
        longest, truncated = int(self.rows.lengths.max()), sum(part.truncated for part in self.datasets)
        return DataSummary(tuple(shares), longest, truncated, packed, self.mixture.capacity)

    def __getitem__(self, step: int) -> list[Batch]:
        return self.collator.micro_batches(self.rows, self.numbers(step))

    def numbers(self, step: int) -> list[np.ndarray]:
        """The documents of each row of a step."""
        if step < 0:
            raise IndexError(step)
        epoch, at = self.place.find(step)
        first = at * self.collator.global_batch_size
        return unit_documents(
            self.order.plan(epoch).rows(first, first + self.collator.global_batch_size), self.mixture.docs_per_row
        )

    def row_locations(self, step: int) -> list[str]:
        return [self.rows.row_location(int(number)) for row in self.numbers(step) for number in row]


def num_target_tokens(part: TokenizedDataset, passes: float) -> int:
    """Tokens that so many passes teach."""
    return round(part.targets * passes)


def describe_rows(part: TokenizedDataset, once: bool, skipped: str = "skipped") -> str:
    """What the rows are; how many, and what became of those that are no documents, where that is not told beside it."""
    found = part.prepared
    told = once and found == PreprocessSummary(rows=found.rows, row_format=found.row_format)
    return (
        found.row_format
        if told and found.row_format
        else ", ".join(filter(None, (found.row_format, found.format(skipped))))
    )
