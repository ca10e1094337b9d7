"""Several sources in one: which rows of each an epoch holds, by shares, passes and caps."""

import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import numpy as np

from tunekit.config.choices import kind_name
from tunekit.data.datasets import DataConfig, DatasetConfig, SFTDataset
from tunekit.data.preprocess.tokenized_dataset import Document, TokenizedDataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import FieldError, UserError

SHARED_KEYS = ("max_length", "packing", "shuffle")  # keys that the mix says for all of its parts


@dataclass(frozen=True)
class MixtureMemberBase:
    """One source of a mix, and how much of it an epoch takes."""

    dataset: DatasetConfig
    weight: float | None = None  # share of the mix's rows, relative to the weights of the others
    repeat: float = 1.0  # passes in an epoch of the mix; 0.5 takes half of the rows, the other half comes next
    max_samples_per_epoch: int | None = None  # rows in an epoch of the mix at most, others in each epoch

    def __post_init__(self) -> None:
        if self.weight is not None and not 0 < self.weight < math.inf:
            raise FieldError("weight", f"must be above 0, not {self.weight}: take the part out")
        if not 0 < self.repeat < math.inf:
            raise FieldError("repeat", f"must be above 0, not {self.repeat}")
        if self.max_samples_per_epoch is not None and self.max_samples_per_epoch < 1:
            raise FieldError("max_samples_per_epoch", f"must be 1 or more rows, not {self.max_samples_per_epoch}")

    def max_rows_per_epoch(self, count: int) -> float:
        """Rows that an epoch may take, where the part has `count`."""
        return min(
            max(1.0, self.repeat * count),
            math.inf if self.max_samples_per_epoch is None else self.max_samples_per_epoch,
        )


@dataclass(frozen=True)
class MixtureBase(DataConfig):
    """Rows of several sources, whatever they are."""

    datasets: tuple[MixtureMemberBase, ...]
    temperature: float = 1.0  # 1: as many rows as there are; above: shares that are more even
    max_length: int = 2048  # Maximum tokens per row
    packing: bool = False  # Pack whole documents into rows of `max_length` tokens, without cross-document attention
    shuffle: bool = True  # false: one part after the other, each in its order

    def __post_init__(self) -> None:
        if not self.datasets:
            raise FieldError("datasets", "name at least one: [{dataset: {kind: chat, source: ...}}]")
        if self.max_length < 2:
            raise FieldError("max_length", f"must be 2 or more tokens, not {self.max_length}")
        if not 1 <= self.temperature < math.inf:
            raise FieldError("temperature", f"must be 1 (as many as there are) or above, not {self.temperature}")
        self.check_weights()
        usual = {field.name: field.default for field in fields(DatasetConfig)}
        for i, part in enumerate(self.datasets):
            for name in SHARED_KEYS:
                if vars(part.dataset)[name] not in (usual[name], vars(self)[name]):
                    raise FieldError(
                        f"datasets.{i}.dataset.{name}", "must be the same for all datasets. Set it next to `datasets`"
                    )

    def check_weights(self) -> None:
        """All parts have a weight, or none."""
        without = [i for i, part in enumerate(self.datasets) if part.weight is None]
        if 0 < len(without) < len(self.datasets):
            raise FieldError(f"datasets.{without[0]}", "has no weight, but others have: give one to each, or to none")
        if not without and self.temperature != 1:
            raise FieldError("temperature", "weights say the shares already: leave one of both out")
        if len(self.datasets) > 1 and any(part.dataset.streaming for part in self.datasets):
            if without:
                raise FieldError("datasets", "one is a stream, so the mix has no epochs: give all parts a weight")
            for i, part in enumerate(self.datasets):
                if (part.repeat, part.max_samples_per_epoch) != (1, None):
                    raise FieldError(f"datasets.{i}", "a mix with a stream has no epochs: epochs and caps say nothing")

    @staticmethod
    def from_config(choice: "DatasetConfig | MixtureBase") -> "MixtureBase":
        """A mix as it is, and rows as a mix of one part."""
        if isinstance(choice, MixtureBase):
            return choice
        return MixtureBase(
            (MixtureMemberBase(choice),), max_length=choice.max_length, packing=choice.packing, shuffle=choice.shuffle
        )

    @property
    def docs_per_row(self) -> int:
        """Documents that are never torn: of one, or of a pair."""
        return self.datasets[0].dataset.docs_per_row

    @property
    def capacity(self) -> int | None:
        """Tokens of a packed row, in which a pair fits too; None: each document is a row of its own."""
        return self.docs_per_row * self.max_length if self.packing else None

    @property
    def dataset_configs(self) -> tuple[DatasetConfig, ...]:
        """The choices of the parts, with what the mix says for all of them."""
        shared = {name: vars(self)[name] for name in SHARED_KEYS}
        return tuple(replace(part.dataset, **shared) for part in self.datasets)

    def resolve(self) -> "MixtureBase":
        """With every part as what its rows turn out to be. UserError if some are pairs and others are not."""
        parts = tuple(replace(part, dataset=part.dataset.resolve()) for part in self.datasets)
        if len({part.dataset.docs_per_row for part in parts}) > 1:
            found = ", ".join(f"{part.dataset.source} gives {kind_name(type(part.dataset))} rows" for part in parts)
            raise UserError(f"datasets: all give pairs, or all give single answers; here {found}")
        return replace(self, datasets=parts)

    def check_source(self) -> None:
        """UserError if a source is not there, as far as can be told without reading it."""
        for rows in self.dataset_configs:
            rows.check_source()

    def prepare_tokenizer(self, tokenizer: Tokenizer) -> Tokenizer:
        """The tokenizer; UserError if the rows of a part cannot be written with it."""
        for rows in self.dataset_configs:
            rows.prepare_tokenizer(tokenizer)
        return tokenizer

    def rows_per_epoch(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Rows of each part in an epoch, where the parts have so many."""
        sizes = [part.max_rows_per_epoch(count) for part, count in zip(self.datasets, rows, strict=True)]
        shares = [part.weight for part in self.datasets if part.weight is not None]
        shares = shares or [size ** (1 / self.temperature) for size in sizes]
        epoch = min(size / share for size, share in zip(sizes, shares, strict=True))
        return tuple(max(1, round(epoch * share)) for share in shares)


@dataclass(frozen=True)
class MixtureMember(MixtureMemberBase):
    """One source of a mix. An epoch of the mix passes it `epochs` times; where shares are given, at most so often.

    A mix with a stream has no epochs: its weights are the shares of each block.
    """

    kind: ClassVar[str] = "part"
    dataset: SFTDataset


@dataclass(frozen=True)
class Mixture(MixtureBase):
    """Rows of several sources. Shares are counted in rows.

    Without weights an epoch holds all that its parts give, each its `epochs` or its `cap`. Weights fix the shares, and
    a temperature above 1 evens them out (rows to the power of 1 / temperature): the epoch then ends with the part that
    has first given all it may. What an epoch leaves of a part comes in the next ones, before any of it comes again.
    """

    kind: ClassVar[str] = "mixture"
    datasets: tuple[MixtureMember, ...]


SFTData = SFTDataset | Mixture  # what a recipe that learns from rows may read


def is_streaming(choice: DatasetConfig | MixtureBase) -> bool:
    """Whether rows are read while they are trained on, so that nobody knows how many there are."""
    return any(part.dataset.streaming for part in MixtureBase.from_config(choice).datasets)


def check_finite(
    data: DatasetConfig | MixtureBase, steps: int | None, validation: DatasetConfig | MixtureBase | None
) -> None:
    """FieldError if nobody knows when a run on a stream, or a validation, is to end."""
    if steps is None and is_streaming(data):
        raise FieldError("max_steps", "is needed, as nobody knows how many steps a stream has")
    if validation is not None and is_streaming(validation):
        raise FieldError("eval_data", "is measured whole: it cannot be a stream; `max_samples` takes the first rows")


def dataset_title(choice: DatasetConfig | MixtureBase) -> str:
    """The sources and their splits, for people."""
    return ", ".join(f"{rows.source} ({rows.split})" for rows in MixtureBase.from_config(choice).dataset_configs)


@dataclass(frozen=True)
class EpochSampler:
    """Which documents an epoch holds: of part i, which has `sizes[i]` of them, the next `counts[i]` of endless passes.

    Every pass over a part has an order of its own, drawn from (seed, part, pass). Documents are numbered through.
    """

    sizes: Sequence[int]
    counts: Sequence[int]
    seed: int
    shuffle: bool

    def __call__(self, epoch: int) -> np.ndarray:
        first = np.concatenate(([0], np.cumsum(self.sizes)))
        parts = [first[part] + self.some(part, epoch * count, count) for part, count in enumerate(self.counts)]
        return np.concatenate(parts)

    def some(self, part: int, start: int, count: int) -> np.ndarray:
        """`count` documents of a part, from the `start`-th on of all its passes."""
        size, found = self.sizes[part], []
        for number in range(start // size, -(-(start + count) // size)):
            low, high = max(start - number * size, 0), min(start + count - number * size, size)
            found.append(self.order(part, number)[low:high])
        return np.concatenate(found)

    def order(self, part: int, number: int) -> np.ndarray:
        """The documents of a part in the order of a pass."""
        if not self.shuffle:
            return np.arange(self.sizes[part])
        return np.random.default_rng([self.seed % 2**32, part, number]).permutation(self.sizes[part])


class ConcatDataset:
    """Documents of several parts, numbered through."""

    def __init__(self, parts: Sequence[TokenizedDataset]) -> None:
        self.parts, self.firsts = parts, np.cumsum([0, *(len(part) for part in parts)]).tolist()
        self.lengths = np.concatenate([part.lengths for part in parts])

    @property
    def fingerprint(self) -> str:
        """Equal for equal parts."""
        return hashlib.sha256("".join(part.fingerprint for part in self.parts).encode()).hexdigest()

    def locate(self, index: int) -> tuple[TokenizedDataset, int]:
        """The part that a document is in, and its number there."""
        part = bisect_right(self.firsts, index) - 1
        if not 0 <= part < len(self.parts):
            raise IndexError(index)
        return self.parts[part], index - self.firsts[part]

    def row_location(self, index: int) -> str:
        part, number = self.locate(index)
        return part.row_location(number)

    def __len__(self) -> int:
        return self.firsts[-1]

    def __getitem__(self, index: int) -> Document:
        part, number = self.locate(index)
        return part[number]

    def __iter__(self) -> Iterator[Document]:
        for part in self.parts:
            yield from part
