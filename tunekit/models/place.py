"""What the layers of one pass share, and what generation keeps between passes."""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from tunekit.kernels.attention import Rule, attend, attend_cached, attend_part
from tunekit.kernels.prefix import Before, Prefixes
from tunekit.kernels.rope import Rotation
from tunekit.kernels.sequence_layout import SequenceLayout


class KV:
    """Keys (B, slots, H_kv, D) and values of one layer in generation; the index of a slot is its position."""

    def __init__(self, k: tuple[int, ...], v: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.k = torch.zeros(k, dtype=dtype, device=device)
        self.v = torch.zeros(v, dtype=dtype, device=device)

    def add(self, k: Tensor, v: Tensor, positions: Tensor, used: int) -> tuple[Tensor, Tensor]:
        """Put (B, S, H_kv, D) at `positions` (B, S); all that the first `used` slots then hold."""
        if k.shape[0] == 1:  # a row alone has no padding: its tokens come one behind the other
            self.k[:, used - k.shape[1] : used], self.v[:, used - k.shape[1] : used] = k, v
        else:
            rows = torch.arange(k.shape[0], device=k.device)[:, None]
            self.k[rows, positions] = k
            self.v[rows, positions] = v
        # On the first pass the cache holds no more than what came, and attention without slots is the faster.
        return (k, v) if used == k.shape[1] else (self.k[:, :used], self.v[:, :used])


class Kept(Protocol):
    """What one layer keeps in generation: the kind is known to its mixer alone."""


class Cache:
    """What generation keeps between passes. Short rows are padded on the right, and overwrite the padding later."""

    def __init__(self, layers: list[Kept]) -> None:
        self.layers = layers
        self.used = 0  # slots that any row may have written


class Rows:
    """Which tokens of the rows of a pass are here: all of them."""

    def keep(self, x: Tensor, value: int = 0) -> Tensor:
        """What is here of (B, S, ...). Where there is nothing to keep, it is `value`."""
        return x

    def gather(self, x: Tensor, length: int) -> Tensor:
        """All (B, S, ...) of rows of this length, from what is here of them."""
        return x

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks that have tokens of these rows. A part's gradient is that of the sum: all of these
        ranks make the same of it, and it counts once."""
        return x

    def stretches(self, length: int) -> tuple[range, ...] | None:
        """Which tokens of each row are here; None: all."""
        return None


WHOLE = Rows()


class Lent:
    """Keys and values of some layers, by their number, from which later ones take them.

    Not a plain dict: FSDP makes others of those that it finds among the arguments of a layer.
    """

    def __init__(self) -> None:
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}

    def lend(self, number: int, kv: tuple[Tensor, Tensor]) -> None:
        """When a layer is run again for its gradients, those who took keep what they took."""
        self.kv.setdefault(number, kv)

    def take(self, number: int) -> tuple[Tensor, Tensor]:
        return self.kv[number]


@dataclass
class Place:
    """What all layers of one pass share: where the tokens are."""

    positions: Tensor  # (B, S) of the tokens that are here
    layout: SequenceLayout | None  # bounds of packed documents, in whole rows
    lengths: Tensor | None  # (B,) tokens of each row that are not padding behind it; None: all, or nobody asks
    rotations: tuple[Rotation, ...]  # one for each distinct Rope of the model
    used: int = 0  # slots of the cache to look at
    rows: Rows = WHOLE  # which tokens of each row are here
    length: int = 0  # of whole rows
    before: Prefixes | Before | None = None  # what documents see before their own tokens
    kv: Lent = field(default_factory=Lent)

    def gather(self, x: Tensor) -> Tensor:
        """(B, length, ...) of whole rows, from what is here."""
        return self.rows.gather(x, self.length)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rule: Rule, sinks: Tensor | None = None) -> Tensor:
        """Queries of what is here on keys and values of whole rows, or of all that a cache has seen."""
        if (stretches := self.rows.stretches(self.length)) is not None:
            assert not isinstance(self.before, Prefixes)
            return attend_part(q, k, v, rule, self.positions, stretches, sinks, self.before)
        if k.shape[1] != q.shape[1]:
            return attend_cached(q, k, v, self.positions, rule, sinks)
        assert not isinstance(self.before, Before)
        return attend(q, k, v, rule, self.layout, sinks, self.before)  # there is nothing but what came now
