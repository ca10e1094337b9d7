"""Interface of the data loaders: micro-batches by step."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from tunekit.data.dataloader.batch import Batch, Collator
from tunekit.data.dataloader.mixture import MixtureBase
from tunekit.data.dataloader.sampler import RowOrder
from tunekit.data.dataloader.summary import DataSummary
from tunekit.data.preprocess.tokenized_dataset import Document, TokenizedDataset
from tunekit.errors import UserError


class DataLoader(ABC):
    """Maps a step to the micro-batches of this rank: `loader[step]`.

    `datasets` are the documents of each dataset of the mixture; with streaming data, those of the first block. `order`
    defines which of them share a row: documents, or groups of `mixture.docs_per_row` of them.
    """

    mixture: MixtureBase
    collator: Collator
    datasets: tuple[TokenizedDataset, ...]
    order: RowOrder

    @abstractmethod
    def __getitem__(self, step: int) -> list[Batch]: ...

    def add_mismatched(self) -> None:
        """Add `mismatched` to all further batches: prompts with the answers of other rows."""
        self.collator = replace(self.collator, max_mismatched_length=self.mixture.max_length)

    def share_prefixes(self) -> bool:
        """Store the common prefix of the documents of a dataset row only once, so that packed rows hold more of them.

        Return False, and change nothing, without packing or with one document per dataset row.
        """
        if self.mixture.docs_per_row == 1 or self.collator.capacity is None:
            return False
        self.collator = replace(self.collator, share_prefixes=True)
        self.replan()
        return True

    @abstractmethod
    def replan(self) -> None:
        """Plan the packed rows again, for shared prefixes. Must be called before the first step."""

    @abstractmethod
    def num_steps(self, epochs: int) -> int:
        """Number of steps of `epochs` epochs."""

    @abstractmethod
    def check_vocab(self, vocab_size: int) -> None:
        """Raise UserError if the model has no embedding for a token, now or when a later block is read."""

    def require_equal_weights(self) -> None:
        """Raise UserError if a row has weights for its target tokens, now or when a later block is read."""
        for dataset in self.datasets:
            dataset.require_equal_weights()

    def check_token_ids(self, datasets: Iterable[TokenizedDataset], vocab_size: int) -> None:
        """Raise UserError if the model has no embedding for a token of these documents, or for padding."""
        max_token = max(self.collator.pad_id, *(int(dataset.tokens.max()) for dataset in datasets))
        if max_token >= vocab_size:
            raise UserError(
                f"data: token id {max_token} is outside the model's vocabulary of {vocab_size} tokens. "
                "Use the tokenizer of this model."
            )

    def check_same_data(self, saved: Any, current: Any) -> None:
        """Raise UserError if the fingerprint of a saved state is another one."""
        if saved != current:
            raise UserError(
                "data: the dataset has changed since the run started. Restore the original data, or pass --overwrite."
            )

    @abstractmethod
    def state_dict(self, step: int) -> dict[str, Any]:
        """Plain values to resume after `step` steps."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state. Raise UserError if the dataset has changed since the run started."""

    @abstractmethod
    def sample_documents(self, count: int) -> list[tuple[str, Document]]:
        """First documents of the first step, with their row locations."""

    @abstractmethod
    def row_locations(self, step: int) -> list[str]:
        """File and row of each document of a recent step, of all ranks."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Hash of the rows."""

    @property
    @abstractmethod
    def summary(self) -> DataSummary:
        """Statistics of an epoch; with streaming data, of the first block."""

    def close(self) -> None:  # noqa: B027 - only streams have any
        """Stop background work, if any."""
