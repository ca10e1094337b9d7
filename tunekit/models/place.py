"""What the layers of one pass share, and what generation keeps between passes."""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from tunekit.kernels.rope import Rotation


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


@dataclass
class Place:
    """What all layers of one pass share: where the tokens are."""

    positions: Tensor  # (B, S)
    offsets: Tensor | None  # bounds of packed documents
    lengths: Tensor | None  # (B,) tokens of each row that are not padding behind it; None: all, or nobody asks
    rotations: tuple[Rotation, ...]  # one for each distinct Rope of the model
    used: int = 0  # slots of the cache to look at
    # Keys and values of those layers, by their number, from which later ones take them.
    kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
