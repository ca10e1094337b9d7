"""Recomputation of cheap intermediate results in the backward pass, instead of saving them."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class RecomputeSource(NamedTuple):
    """Function and inputs from which a tensor can be recomputed. The inputs are saved for another operator anyway."""

    make: Callable[..., Tensor]
    inputs: tuple[Tensor | None, ...]


SOURCES = WeakIdKeyDictionary()  # by tensor, as long as it exists


def mark_recomputable(y: Tensor, make: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
    """Record that make(*inputs) recomputes `y` bit for bit; returns `y`."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        SOURCES[y] = RecomputeSource(make, inputs)
    return y


def recompute_source(x: Tensor) -> RecomputeSource:
    """Source to save instead of `x` for the backward pass; `x` itself if it was not marked."""
    return SOURCES.get(x) or RecomputeSource(identity, (x,))


def identity(x: Tensor) -> Tensor:
    return x
