"""Results that are made again in the backward pass and not kept: they cost little beside what is done with them."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class RecomputeSource(NamedTuple):
    """`make(*inputs)` is a result. The inputs are kept in any case, by what made it first."""

    make: Callable[..., Tensor]
    inputs: tuple[Tensor | None, ...]


SOURCES = WeakIdKeyDictionary()  # of results, as long as they live


def mark_recomputable(y: Tensor, make: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
    """`y`, of which it is now known that make(*inputs) gives the same bits once more."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        SOURCES[y] = RecomputeSource(make, inputs)
    return y


def recompute_source(x: Tensor) -> RecomputeSource:
    """What to keep in place of `x` for a backward pass: `x` itself if nothing is known of it."""
    return SOURCES.get(x) or RecomputeSource(identity, (x,))


def identity(x: Tensor) -> Tensor:
    return x
