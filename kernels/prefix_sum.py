"""Cumulative sums that are deterministic on GPUs, where torch has no deterministic cumsum of floating point numbers."""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
LOWEST = -1e30  # instead of -inf, whose product with 0 is NaN


def prefix_sum(x: Tensor) -> Tensor:
    """`x.cumsum(-1)`, also with `torch.use_deterministic_algorithms(True)` on a GPU."""
    if x.is_cuda and torch.are_deterministic_algorithms_enabled():
        return prefix_sum_by_matmul(x)
    return x.cumsum(-1)


def prefix_sum_by_matmul(x: Tensor) -> Tensor:
    """Sums within blocks by a product with a triangular matrix of ones, plus the sums of all blocks before.

    Sums that include -inf are at most LOWEST.
    """
    size = x.shape[-1]
    blocks = F.pad(x.clamp(min=LOWEST), (0, -size % BLOCK)).unflatten(-1, (-1, BLOCK))
    inner = blocks @ x.new_ones(BLOCK, BLOCK).triu()
    if blocks.shape[-2] > 1:
        totals = inner[..., -1]
        inner = inner + (prefix_sum_by_matmul(totals) - totals)[..., None]
    return inner.flatten(-2)[..., :size]
