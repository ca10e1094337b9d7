"""Data loader of preprocessed rows. A step has the same rows for any number of ranks and any micro-batch size."""

from typing import Any

import numpy as np

from tunekit.data.dataloader.base import DataLoader
from tunekit.data.dataloader.batch import Batch, Collator
from tunekit.data.dataloader.mixture import EpochSampler, MixtureBase
from tunekit.data.dataloader.packing import PackingPlan
from tunekit.data.dataloader.sampler import RowOrder, StepIndex, unit_documents
from tunekit.data.dataloader.shared_prefix import dataset_row_lengths
from tunekit.data.dataloader.summary import DatasetSummary, DataSummary, PromptLengths
from tunekit.data.document import Document
from tunekit.data.preprocess.tokenized_dataset import ConcatDataset, PreprocessSummary, TokenizedDataset


class MapDataLoader(DataLoader):
    """Data loader without state: `loader[step]` is a pure function. The last step of an epoch may be smaller.

    `documents` are those of all datasets; `mixture.docs_per_row` adjacent ones are never separated.
    """

    def __init__(
        self, mixture: MixtureBase, datasets: tuple[TokenizedDataset, ...], collator: Collator, seed: int
    ) -> None:
        assert collator.global_batch_size > 0 and collator.micro_batch_size > 0
        self.mixture, self.datasets, self.collator = mixture, datasets, collator
        self.documents: TokenizedDataset | ConcatDataset = (
            datasets[0] if len(datasets) == 1 else ConcatDataset(datasets)
        )
        self.num_rows = num_rows = [len(dataset) // mixture.docs_per_row for dataset in datasets]
        self.rows_per_epoch = list(mixture.rows_per_epoch(num_rows))
        uses_all = self.rows_per_epoch == num_rows
        self.sampler = None if uses_all else EpochSampler(num_rows, self.rows_per_epoch, seed, mixture.shuffle)
        self.seed = seed
        self.plan_rows()

    def plan_rows(self) -> None:
        lengths = dataset_row_lengths(self.documents, self.mixture.docs_per_row, self.collator.share_prefixes)
        self.order = RowOrder(lengths, self.seed, self.mixture.shuffle, self.mixture.capacity, self.sampler)
        self.step_index = StepIndex(self.order.num_rows, self.collator.global_batch_size)

    def num_steps(self, epochs: int) -> int:
        return self.step_index.num_steps(epochs)

    @property
    def first_plan(self) -> PackingPlan:
        return self.order.plan(0)

    @property
    def fingerprint(self) -> str:
        return self.documents.fingerprint

    def sample_documents(self, count: int) -> list[tuple[str, Document]]:
        indices = [int(index) for row in self.document_indices(0) for index in row][:count]
        return [(self.documents.row_location(index), self.documents[index]) for index in indices]

    def state_dict(self, step: int) -> dict[str, Any]:
        """Fingerprint of the rows, to detect changed data. Everything else follows from the step."""
        return {"rows": self.documents.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_same_data(state, self.state_dict(0))

    @property
    def summary(self) -> DataSummary:
        items = self.order.items(0)
        dataset_index = np.repeat(np.arange(len(self.datasets)), self.num_rows)[items]
        tokens = np.bincount(dataset_index, self.order.lengths[items], len(self.datasets)).astype(int).tolist()
        columns = zip(
            self.mixture.dataset_configs, self.datasets, self.num_rows, self.rows_per_epoch, tokens, strict=True
        )
        summaries = [
            DatasetSummary(
                name=config.source,
                description=describe_rows(dataset, count == total),
                rows=count,
                tokens=num_tokens,
                num_target_tokens=round(dataset.num_target_tokens * (count / total)) * config.has_targets,
                passes=count / total,
                noun="document" if dataset.summary.split else "row" if config.has_targets else "prompt",
            )
            for config, dataset, total, count, num_tokens in columns
        ]
        num_packed_rows = None if self.mixture.capacity is None else self.order.num_rows(0)
        lengths = self.documents.lengths
        max_length = int(lengths.max())
        num_truncated = sum(dataset.num_truncated for dataset in self.datasets)
        prompt_lengths = PromptLengths(int(lengths.min()), int(np.median(lengths)), max_length)
        return DataSummary(
            tuple(summaries),
            max_length,
            num_truncated,
            num_packed_rows,
            self.mixture.capacity,
            prompt_lengths=None if self.mixture.has_targets else prompt_lengths,
        )

    def __getitem__(self, step: int) -> list[Batch]:
        return self.collator.micro_batches(self.documents, self.document_indices(step))

    def document_indices(self, step: int) -> list[np.ndarray]:
        """Document indices of each row of a step."""
        if step < 0:
            raise IndexError(step)
        epoch, index = self.step_index.locate(step)
        first = index * self.collator.global_batch_size
        rows = self.order.plan(epoch).rows(first, first + self.collator.global_batch_size)
        return unit_documents(rows, self.mixture.docs_per_row)

    def row_locations(self, step: int) -> list[str]:
        return [self.documents.row_location(int(index)) for row in self.document_indices(step) for index in row]


def describe_rows(dataset: TokenizedDataset, once: bool, skipped: str = "skipped") -> str:
    """Format of the rows, and their counts unless each row is used once and is one document."""
    summary = dataset.summary
    is_plain = once and summary == PreprocessSummary(rows=summary.rows, row_format=summary.row_format)
    if is_plain and summary.row_format:
        return summary.row_format
    return ", ".join(filter(None, (summary.row_format, summary.format(skipped))))
