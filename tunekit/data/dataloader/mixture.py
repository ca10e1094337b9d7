"""Several sources in one: which rows of each an epoch holds, by shares, passes and caps."""

import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import numpy as np

from tunekit.config.choices import kind_name
from tunekit.data.datasets import DataConfig, DatasetConfig, OneSource
from tunekit.data.preprocess.tokenized_dataset import Document, TokenizedDataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import FieldError, UserError

SHARED = ("length", "pack", "shuffle")  # keys that the mix says for all of its parts


@dataclass(frozen=True)
class MixtureMemberBase:
    """One source of a mix, and how much of it an epoch takes."""

    rows: DatasetConfig
    weight: float | None = None  # share of the mix's rows, relative to the weights of the others
    epochs: float = 1.0  # passes in an epoch of the mix; 0.5 takes half of the rows, the other half comes next
    cap: int | None = None  # rows in an epoch of the mix at most, others in each epoch

    def __post_init__(self) -> None:
        if self.weight is not None and not 0 < self.weight < math.inf:
            raise FieldError("weight", f"must be above 0, not {self.weight}: take the part out")
        if not 0 < self.epochs < math.inf:
            raise FieldError("epochs", f"must be above 0, not {self.epochs}")
        if self.cap is not None and self.cap < 1:
            raise FieldError("cap", f"must be 1 or more rows, not {self.cap}")

    def size(self, count: int) -> float:
        """Rows that an epoch may take, where the part has `count`."""
        return min(max(1.0, self.epochs * count), math.inf if self.cap is None else self.cap)


@dataclass(frozen=True)
class MixtureBase(DataConfig):
    """Rows of several sources, whatever they are."""

    parts: tuple[MixtureMemberBase, ...]
    temperature: float = 1.0  # 1: as many rows as there are; above: shares that are more even
    length: int = 2048  # the most tokens of a row, in all parts
    pack: bool = False  # fill rows of `length` tokens with whole documents, of all parts together
    shuffle: bool = True  # false: one part after the other, each in its order

    def __post_init__(self) -> None:
        if not self.parts:
            raise FieldError("parts", "name at least one: [{rows: {kind: chat, source: ...}}]")
        if self.length < 2:
            raise FieldError("length", f"must be 2 or more tokens, not {self.length}")
        if not 1 <= self.temperature < math.inf:
            raise FieldError("temperature", f"must be 1 (as many as there are) or above, not {self.temperature}")
        self.check_shares()
        usual = {field.name: field.default for field in fields(DatasetConfig)}
        for i, part in enumerate(self.parts):
            for name in SHARED:
                if vars(part.rows)[name] not in (usual[name], vars(self)[name]):
                    raise FieldError(f"parts.{i}.rows.{name}", "is the same for all parts: write it beside `parts`")

    def check_shares(self) -> None:
        """All parts have a weight, or none."""
        without = [i for i, part in enumerate(self.parts) if part.weight is None]
        if 0 < len(without) < len(self.parts):
            raise FieldError(f"parts.{without[0]}", "has no weight, but others have: give one to each, or to none")
        if not without and self.temperature != 1:
            raise FieldError("temperature", "weights say the shares already: leave one of both out")
        if len(self.parts) > 1 and any(part.rows.stream for part in self.parts):
            if without:
                raise FieldError("parts", "one is a stream, so the mix has no epochs: give all parts a weight")
            for i, part in enumerate(self.parts):
                if (part.epochs, part.cap) != (1, None):
                    raise FieldError(f"parts.{i}", "a mix with a stream has no epochs: epochs and caps say nothing")

    @staticmethod
    def of(choice: "DatasetConfig | MixtureBase") -> "MixtureBase":
        """A mix as it is, and rows as a mix of one part."""
        if isinstance(choice, MixtureBase):
            return choice
        return MixtureBase((MixtureMemberBase(choice),), length=choice.length, pack=choice.pack, shuffle=choice.shuffle)

    @property
    def each(self) -> int:
        """Documents that are never torn: of one, or of a pair."""
        return self.parts[0].rows.EACH

    @property
    def capacity(self) -> int | None:
        """Tokens of a packed row, in which a pair fits too; None: each document is a row of its own."""
        return self.each * self.length if self.pack else None

    @property
    def sources(self) -> tuple[DatasetConfig, ...]:
        """The choices of the parts, with what the mix says for all of them."""
        shared = {name: vars(self)[name] for name in SHARED}
        return tuple(replace(part.rows, **shared) for part in self.parts)

    def settled(self) -> "MixtureBase":
        """With every part as what its rows turn out to be. UserError if some are pairs and others are not."""
        parts = tuple(replace(part, rows=part.rows.settled()) for part in self.parts)
        if len({part.rows.EACH for part in parts}) > 1:
            found = ", ".join(f"{part.rows.source} gives {kind_name(type(part.rows))} rows" for part in parts)
            raise UserError(f"parts: all give pairs, or all give single answers; here {found}")
        return replace(self, parts=parts)

    def check(self) -> None:
        """UserError if a source is not there, as far as can be told without reading it."""
        for rows in self.sources:
            rows.check()

    def prepare(self, tokenizer: Tokenizer) -> Tokenizer:
        """The tokenizer; UserError if the rows of a part cannot be written with it."""
        for rows in self.sources:
            rows.prepare(tokenizer)
        return tokenizer

    def counts(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Rows of each part in an epoch, where the parts have so many."""
        sizes = [part.size(count) for part, count in zip(self.parts, rows, strict=True)]
        shares = [part.weight for part in self.parts if part.weight is not None]
        shares = shares or [size ** (1 / self.temperature) for size in sizes]
        epoch = min(size / share for size, share in zip(sizes, shares, strict=True))
        return tuple(max(1, round(epoch * share)) for share in shares)


@dataclass(frozen=True)
class MixtureMember(MixtureMemberBase):
    """One source of a mix. An epoch of the mix passes it `epochs` times; where shares are given, at most so often.

    A mix with a stream has no epochs: its weights are the shares of each block.
    """

    kind: ClassVar[str] = "part"
    rows: OneSource


@dataclass(frozen=True)
class Mixture(MixtureBase):
    """Rows of several sources. Shares are counted in rows.

    Without weights an epoch holds all that its parts give, each its `epochs` or its `cap`. Weights fix the shares, and
    a temperature above 1 evens them out (rows to the power of 1 / temperature): the epoch then ends with the part that
    has first given all it may. What an epoch leaves of a part comes in the next ones, before any of it comes again.
    """

    kind: ClassVar[str] = "mix"
    parts: tuple[MixtureMember, ...]


Learnable = OneSource | Mixture  # what a recipe that learns from rows may read


def is_streaming(choice: DatasetConfig | MixtureBase) -> bool:
    """Whether rows are read while they are trained on, so that nobody knows how many there are."""
    return any(part.rows.stream for part in MixtureBase.of(choice).parts)


def check_finite(
    data: DatasetConfig | MixtureBase, steps: int | None, validation: DatasetConfig | MixtureBase | None
) -> None:
    """FieldError if nobody knows when a run on a stream, or a validation, is to end."""
    if steps is None and is_streaming(data):
        raise FieldError("steps", "is needed, as nobody knows how many steps a stream has")
    if validation is not None and is_streaming(validation):
        raise FieldError("validation", "is measured whole: it cannot be a stream; `limit` takes the first rows")


def dataset_title(choice: DatasetConfig | MixtureBase) -> str:
    """The sources and their splits, for people."""
    return ", ".join(f"{rows.source} ({rows.split})" for rows in MixtureBase.of(choice).sources)


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
    def digest(self) -> str:
        """Equal for equal parts."""
        return hashlib.sha256("".join(part.digest for part in self.parts).encode()).hexdigest()

    def find(self, index: int) -> tuple[TokenizedDataset, int]:
        """The part that a document is in, and its number there."""
        part = bisect_right(self.firsts, index) - 1
        if not 0 <= part < len(self.parts):
            raise IndexError(index)
        return self.parts[part], index - self.firsts[part]

    def where(self, index: int) -> str:
        part, number = self.find(index)
        return part.where(number)

    def __len__(self) -> int:
        return self.firsts[-1]

    def __getitem__(self, index: int) -> Document:
        part, number = self.find(index)
        return part[number]

    def __iter__(self) -> Iterator[Document]:
        for part in self.parts:
            yield from part
