"""Boundaries of tensor parallel layers."""

from typing import Protocol

import torch
from torch import Tensor


class NoParallel:
    """Layer without tensor parallelism: all tokens and weights are local. `distributed` replaces it by collectives."""

    @property
    def index(self) -> int:
        """Index of this rank among those that share the layer."""
        return 0

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """Sum over these ranks. Its gradient is passed to each rank once."""
        return x

    def enter(self, x: Tensor, shape: torch.Size | None = None) -> Tensor:
        """All tokens (B, S, dim) from the local ones. Without `shape` (B, S), rows may be joined and padded."""
        return x

    def leave(self, y: Tensor) -> Tensor:
        """Local tokens of the layer's output."""
        return y

    def local_tokens(self, x: Tensor) -> Tensor:
        """Tokens that this rank holds between layers."""
        return x


NO_PARALLEL = NoParallel()


class ShardGroup(Protocol):
    """Ranks that hold the other shards of a weight."""

    @property
    def index(self) -> int: ...  # of this rank

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        ...

    def gather_columns(self, x: Tensor, total: int) -> Tensor:
        """Columns (..., total) of all ranks."""
        ...
