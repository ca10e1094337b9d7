"""Mixtures of datasets: how many rows of each dataset an epoch contains, by weights, repeats, and limits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import numpy as np

from tunekit.config.choices import kind_name
from tunekit.data.chat_template.chat_format import with_chat_format
from tunekit.data.chat_template.template import TemplateKwargs, check_template_kwargs
from tunekit.data.datasets import ChatTemplateMixin, DataConfig, DatasetConfig
from tunekit.data.sft_datasets import SFTDataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import FieldError, UserError

SHARED_KEYS = ("max_length", "packing", "shuffle")  # keys that a mixture sets for all of its datasets
TEMPLATE_KEYS = ("chat_template", "chat_template_kwargs")  # also shared, by datasets with a chat template


@dataclass(frozen=True)
class MixtureMemberBase:
    """One dataset of a mixture, and how much of it an epoch contains."""

    dataset: DatasetConfig
    weight: float | None = None  # Fraction of the rows, relative to the weights of the other datasets
    repeat: float = 1.0  # Passes per epoch of the mixture; 0.5: half of the rows, the other half in the next epoch
    max_samples_per_epoch: int | None = None  # Maximum rows per epoch; each epoch uses other rows

    def __post_init__(self) -> None:
        if self.weight is not None and not 0 < self.weight < math.inf:
            raise FieldError("weight", f"must be > 0, got {self.weight}. Remove the dataset to leave it out")
        if not 0 < self.repeat < math.inf:
            raise FieldError("repeat", f"must be > 0, got {self.repeat}")
        if self.max_samples_per_epoch is not None and self.max_samples_per_epoch < 1:
            raise FieldError("max_samples_per_epoch", f"must be >= 1, got {self.max_samples_per_epoch}")

    def max_rows_per_epoch(self, num_rows: int) -> float:
        """Maximum number of rows in an epoch for a dataset of `num_rows`."""
        limit = math.inf if self.max_samples_per_epoch is None else self.max_samples_per_epoch
        return min(max(1.0, self.repeat * num_rows), limit)


@dataclass(frozen=True)
class MixtureBase(DataConfig):
    """Rows of several datasets."""

    datasets: tuple[MixtureMemberBase, ...]
    temperature: float = 1.0  # 1: proportional to the number of rows; above 1: more even fractions
    max_length: int = 2048  # Maximum tokens per row
    packing: bool = False  # Pack whole documents into rows of `max_length` tokens, without cross-document attention
    shuffle: bool = True  # Shuffle the rows of all datasets; false: one dataset after the other, in file order
    chat_template: str | None = None  # Jinja file, or the name of a bundled template, for all datasets
    # Values of template variables; each dataset may add more, for its own rows
    chat_template_kwargs: TemplateKwargs = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not self.datasets:
            raise FieldError("datasets", "must not be empty, as in [{dataset: {kind: chat, source: ...}}]")
        if self.max_length < 2:
            raise FieldError("max_length", f"must be >= 2, got {self.max_length}")
        if not 1 <= self.temperature < math.inf:
            raise FieldError("temperature", f"must be >= 1, got {self.temperature}")
        self.check_weights()
        check_template_kwargs(self.chat_template_kwargs)
        defaults = {item.name: item.default for item in fields(ChatTemplateMixin)}
        for i, member in enumerate(self.datasets):
            has_template = isinstance(member.dataset, ChatTemplateMixin)
            for name in (*SHARED_KEYS, "chat_template") if has_template else SHARED_KEYS:
                if getattr(member.dataset, name) not in (defaults[name], getattr(self, name)):
                    raise FieldError(
                        f"datasets.{i}.dataset.{name}", "must be the same for all datasets. Set it next to `datasets`"
                    )

    def check_weights(self) -> None:
        """Raise FieldError unless all datasets have a weight or none, and the other keys agree with it."""
        without_weight = [i for i, member in enumerate(self.datasets) if member.weight is None]
        if 0 < len(without_weight) < len(self.datasets):
            field = f"datasets.{without_weight[0]}"
            raise FieldError(field, "has no weight, but other datasets have one. Set `weight` for all or for none")
        if not without_weight and self.temperature != 1:
            raise FieldError("temperature", "cannot be combined with weights. Remove one of them")
        if len(self.datasets) > 1 and any(member.dataset.streaming for member in self.datasets):
            if without_weight:
                raise FieldError("datasets", "a mixture with streaming data needs a `weight` for each dataset")
            for i, member in enumerate(self.datasets):
                if (member.repeat, member.max_samples_per_epoch) != (1, None):
                    problem = "a mixture with streaming data has no epochs. Remove `repeat` and `max_samples_per_epoch`"
                    raise FieldError(f"datasets.{i}", problem)

    @staticmethod
    def from_config(config: "DatasetConfig | MixtureBase") -> "MixtureBase":
        """The mixture itself, or a mixture of one dataset."""
        if isinstance(config, MixtureBase):
            return config
        values: dict[str, Any] = {name: getattr(config, name) for name in SHARED_KEYS}
        if isinstance(config, ChatTemplateMixin):
            values |= {name: getattr(config, name) for name in TEMPLATE_KEYS}
        return MixtureBase((MixtureMemberBase(config),), **values)

    @property
    def docs_per_row(self) -> int:
        """Adjacent documents that count as one row: 2 for pairs, else 1."""
        return self.datasets[0].dataset.docs_per_row

    @property
    def has_targets(self) -> bool:
        """False: prompts, whose answers are sampled in training."""
        return self.datasets[0].dataset.has_targets

    @property
    def capacity(self) -> int | None:
        """Tokens of a packed row, which has room for a full pair; None: no packing."""
        return self.docs_per_row * self.max_length if self.packing else None

    @property
    def dataset_configs(self) -> tuple[DatasetConfig, ...]:
        """Configs of the datasets, with the keys that the mixture sets for all of them."""
        values = {name: getattr(self, name) for name in SHARED_KEYS}
        configs = (replace(member.dataset, **values) for member in self.datasets)
        return tuple(self.with_shared_template(config) for config in configs)

    def with_shared_template(self, config: DatasetConfig) -> DatasetConfig:
        """Config of a dataset with the chat template of the mixture, if the dataset uses one."""
        if not isinstance(config, ChatTemplateMixin):
            return config
        kwargs = {**self.chat_template_kwargs, **config.chat_template_kwargs}
        return replace(config, chat_template=self.chat_template, chat_template_kwargs=kwargs)

    def resolve(self) -> "MixtureBase":
        """Replace `auto` datasets by what their rows are. Raise UserError if only some of them are pairs."""
        members = tuple(replace(member, dataset=member.dataset.resolve()) for member in self.datasets)
        if len({member.dataset.docs_per_row for member in members}) > 1:
            kinds = ", ".join(f"{member.dataset.source} ({kind_name(type(member.dataset))})" for member in members)
            problem = "must be all pairs, all single answers, or rows with the same number of negatives"
            raise UserError(f"datasets: {problem}, got {kinds}")
        return replace(self, datasets=members)

    def check_source(self) -> None:
        """Raise UserError if a source does not exist. Reads no rows."""
        for config in self.dataset_configs:
            config.check_source()

    def prepare_tokenizer(self, tokenizer: Tokenizer) -> Tokenizer:
        """Tokenizer with the chat template of the mixture. Raise UserError if it cannot encode a dataset."""
        for config in self.dataset_configs:
            config.prepare_tokenizer(tokenizer)
        return with_chat_format(tokenizer, self.chat_template, self.chat_template_kwargs)

    def rows_per_epoch(self, num_rows: Sequence[int]) -> tuple[int, ...]:
        """Rows of each dataset in an epoch, for datasets of `num_rows`."""
        sizes = [member.max_rows_per_epoch(count) for member, count in zip(self.datasets, num_rows, strict=True)]
        weights = [member.weight for member in self.datasets if member.weight is not None]
        weights = weights or [size ** (1 / self.temperature) for size in sizes]
        scale = min(size / weight for size, weight in zip(sizes, weights, strict=True))
        return tuple(max(1, round(scale * weight)) for weight in weights)


@dataclass(frozen=True)
class MixtureMember(MixtureMemberBase):
    """One dataset of a mixture. An epoch contains it `repeat` times; with weights, at most.

    Mixtures with streaming data have no epochs: weights are fractions of each block.
    """

    kind: ClassVar[str] = "part"
    dataset: SFTDataset


@dataclass(frozen=True)
class Mixture(MixtureBase):
    """Rows of several datasets. Fractions are counted in rows.

    Without weights, an epoch contains all rows of all datasets, subject to `repeat` and `max_samples_per_epoch`.
    Weights set the fractions. A temperature above 1 makes them more even (rows to the power of 1 / temperature). The
    epoch ends with the first dataset that has no rows left. The unused rows of the other datasets are used in the
    next epochs, before any row is repeated.
    """

    kind: ClassVar[str] = "mixture"
    datasets: tuple[MixtureMember, ...]


SFTData = SFTDataset | Mixture  # datasets of the recipes that train on target tokens


def is_streaming(config: DatasetConfig | MixtureBase) -> bool:
    """Whether rows are read during training, so that their number is unknown."""
    return any(member.dataset.streaming for member in MixtureBase.from_config(config).datasets)


def check_finite(
    data: DatasetConfig | MixtureBase, max_steps: int | None, eval_data: DatasetConfig | MixtureBase | None
) -> None:
    """Raise FieldError if training on a stream has no last step, or if the evaluation data is a stream."""
    if max_steps is None and is_streaming(data):
        raise FieldError("max_steps", "is required with streaming data")
    if eval_data is not None and is_streaming(eval_data):
        raise FieldError("eval_data", "cannot be streamed. Set streaming=false and limit its rows with `max_samples`")


def dataset_title(config: DatasetConfig | MixtureBase) -> str:
    """Sources and splits as text, such as `rows.jsonl (train)`."""
    return ", ".join(
        f"{dataset.source} ({dataset.split})" for dataset in MixtureBase.from_config(config).dataset_configs
    )


@dataclass(frozen=True)
class EpochSampler:
    """Row indices of an epoch: the next `counts[i]` rows of endless passes over dataset i, which has `sizes[i]` rows.

    Each pass has its own order, drawn from (seed, dataset, pass). Indices run through all datasets.
    """

    sizes: Sequence[int]
    counts: Sequence[int]
    seed: int
    shuffle: bool

    def __call__(self, epoch: int) -> np.ndarray:
        starts = np.concatenate(([0], np.cumsum(self.sizes)))
        rows = [starts[i] + self.take(i, epoch * count, count) for i, count in enumerate(self.counts)]
        return np.concatenate(rows)

    def take(self, dataset: int, start: int, count: int) -> np.ndarray:
        """`count` row indices of a dataset, from position `start` of its concatenated passes on."""
        size, rows = self.sizes[dataset], []
        for pass_index in range(start // size, -(-(start + count) // size)):
            low, high = max(start - pass_index * size, 0), min(start + count - pass_index * size, size)
            rows.append(self.order(dataset, pass_index)[low:high])
        return np.concatenate(rows)

    def order(self, dataset: int, pass_index: int) -> np.ndarray:
        """Row indices of a dataset in the order of one pass."""
        if not self.shuffle:
            return np.arange(self.sizes[dataset])
        return np.random.default_rng([self.seed % 2**32, dataset, pass_index]).permutation(self.sizes[dataset])
