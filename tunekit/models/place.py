"""What the layers of one pass share, and what generation keeps between passes."""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from tunekit.models.rope import Rotation


class KV:
    """Keys (B, slots, H_kv, D) and values of one layer in generation; the index of a slot is its position."""

    def __init__(self, k: tuple[int, ...], v: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.k = torch.zeros(k, dtype=dtype, device=device)
        self.v = torch.zeros(v, dtype=dtype, device=device)

    def write(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Put (B, S, H_kv, D) at `positions` (B, S)."""
        rows = torch.arange(k.shape[0], device=k.device)[:, None]
        self.k[rows, positions] = k
        self.v[rows, positions] = v


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
    rotations: tuple[Rotation, ...]  # one for each distinct Rope of the model
    used: int = 0  # slots of the cache to look at
    # Keys and values by the number of their layer, for later layers that take them.
    kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
