"""Datasets of the embed recipe: queries with documents, or pairs of texts with a similarity, or a mixture."""

from dataclasses import dataclass
from typing import ClassVar

from tunekit.data.dataloader.mixture import MixtureBase, MixtureMemberBase
from tunekit.data.datasets import DatasetConfig
from tunekit.data.embedding_datasets import RetrievalDataset, SimilarityDataset
from tunekit.errors import UserError


@dataclass(frozen=True)
class EmbeddingMixtureMember(MixtureMemberBase):
    """One dataset of a mixture. An epoch contains it `repeat` times; with weights, at most.

    Mixtures with streaming data have no epochs: weights are fractions of each block.
    """

    kind: ClassVar[str] = "part"
    dataset: RetrievalDataset | SimilarityDataset


@dataclass(frozen=True)
class EmbeddingMixture(MixtureBase):
    """Rows of several datasets, all of one kind and with the same number of hard negatives.

    Without weights, an epoch contains all rows of all datasets, subject to `repeat` and `max_samples_per_epoch`.
    Weights set the fractions. A temperature above 1 makes them more even (rows to the power of 1 / temperature).
    """

    kind: ClassVar[str] = "mixture"
    datasets: tuple[EmbeddingMixtureMember, ...]


EmbeddingData = RetrievalDataset | SimilarityDataset | EmbeddingMixture  # datasets of the embed recipe


def check_rows(
    data: DatasetConfig | MixtureBase, eval_data: DatasetConfig | MixtureBase | None, global_batch_size: int
) -> None:
    """Raise UserError if the first rows are invalid, if datasets do not fit each other, or for steps of one pair."""
    mixture = MixtureBase.from_config(data).resolve()
    has_negatives = mixture.docs_per_row > 2 or global_batch_size > 1 or mixture.packing
    if isinstance(mixture.dataset_configs[0], RetrievalDataset) and not has_negatives:
        problem = "no negatives in a step: they are the documents of the other rows of a step, and hard negatives"
        raise UserError(f"global_batch_size: {problem}. Set global_batch_size to 2 or more, or add hard negatives.")
    if eval_data is not None:
        MixtureBase.from_config(eval_data).resolve()


def read_text_options(data: DatasetConfig | MixtureBase) -> tuple[int, dict[str, str]]:
    """Maximum tokens of a text, and the prompts that are saved with the model: those of the first dataset."""
    mixture = MixtureBase.from_config(data)
    dataset = mixture.dataset_configs[0]
    prompts = dataset.prompts if isinstance(dataset, RetrievalDataset | SimilarityDataset) else {}
    return mixture.max_length, prompts
