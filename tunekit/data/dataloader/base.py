"""Interface of the data loaders: micro-batches by step."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tunekit.data.dataloader.batch import Batch, Collator
from tunekit.data.dataloader.mixture import MixtureBase
from tunekit.data.dataloader.packing import PackingPlan
from tunekit.data.dataloader.summary import DataSummary
from tunekit.data.document import Document
from tunekit.data.preprocess.tokenized_dataset import TokenizedDataset
from tunekit.errors import UserError


class DataLoader(ABC):
    """Maps a step to the micro-batches of this rank: `loader[step]`.

    `datasets` are the documents of each dataset of the mixture; with streaming data, those of the first block.
    """

    mixture: MixtureBase
    collator: Collator
    datasets: tuple[TokenizedDataset, ...]

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
        self.plan_rows()
        return True

    @abstractmethod
    def plan_rows(self) -> None:
        """Plan which documents share a row. Must be called before the first step."""

    @property
    @abstractmethod
    def first_plan(self) -> PackingPlan:
        """Rows of the first epoch, or of the first block: documents, or groups of `mixture.docs_per_row` of them."""

    @abstractmethod
    def num_steps(self, epochs: int) -> int:
        """Number of steps of `epochs` epochs."""

    def add_check(self, check: Callable[[TokenizedDataset], None]) -> None:
        """Call `check`, which may raise UserError, for all documents; with streaming data, also for later blocks."""
        for dataset in self.datasets:
            check(dataset)

    def check_vocab(self, vocab_size: int) -> None:
        """Raise UserError if the model has no embedding for a token or for padding. Later blocks are checked too."""

        def check_tokens(dataset: TokenizedDataset) -> None:
            max_token = max(self.collator.pad_id, int(dataset.tokens.max()))
            if max_token >= vocab_size:
                raise UserError(
                    f"data: token id {max_token} is outside the model's vocabulary of {vocab_size} tokens. "
                    "Use the tokenizer of this model."
                )

        self.add_check(check_tokens)

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
