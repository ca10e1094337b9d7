"""What recipes step through, wherever its rows are."""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

from tunekit.data.dataloader.batch import Batch, Collator
from tunekit.data.dataloader.mixture import MixtureBase
from tunekit.data.dataloader.sampler import RowOrder
from tunekit.data.dataloader.summary import DataSummary
from tunekit.data.preprocess.tokenized_dataset import Document, TokenizedDataset


class DataLoader(ABC):
    """`loader[step]`: the micro-batches of this rank.

    `parts` are the documents of each part of the mix (of a stream, those of its first block), and `order` says which
    share a row: documents, or units of `mix.each` of them.
    """

    mixture: MixtureBase
    collator: Collator
    datasets: tuple[TokenizedDataset, ...]
    order: RowOrder

    @abstractmethod
    def __getitem__(self, step: int) -> list[Batch]: ...

    def add_mismatched(self) -> None:
        """From now on, batches have `others`: answers that do not belong to their prompts."""
        self.collator = replace(self.collator, crossed=self.mixture.max_length)

    def share_prefixes(self) -> bool:
        """From now on, what documents of a unit begin with is written once in packed rows, which then hold more.

        False where rows are not packed, or documents stand alone.
        """
        if self.mixture.docs_per_row == 1 or self.collator.capacity is None:
            return False
        self.collator = replace(self.collator, shared=True)
        self.replan()
        return True

    @abstractmethod
    def replan(self) -> None:
        """Say anew which documents share a row, before the first step."""

    @abstractmethod
    def num_steps(self, epochs: int) -> int:
        """How many steps so many epochs have."""

    @abstractmethod
    def check_vocab(self, vocab: int) -> None:
        """UserError if the model has no embedding for a token."""

    @abstractmethod
    def state_dict(self, step: int) -> dict[str, Any]:
        """What to keep when `step` steps are done: plain values."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. UserError if these are not the rows that the run began with."""

    @abstractmethod
    def sample_documents(self, count: int) -> list[tuple[str, Document]]:
        """Some documents of the first step, and where they are from."""

    @abstractmethod
    def row_locations(self, step: int) -> list[str]:
        """Where the documents of a step are from, all ranks' of them. The step was made not long ago."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Equal for equal rows."""

    @property
    @abstractmethod
    def summary(self) -> DataSummary:
        """What an epoch holds, or the first block of a stream."""

    @abstractmethod
    def close(self) -> None:
        """Nothing more is wanted: what is under way ends."""
