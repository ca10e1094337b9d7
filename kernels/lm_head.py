"""The output layer of a model, as losses see it, and its vocabulary divided among ranks."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn


class VocabShard(Protocol):
    """Shard of the vocabulary on this rank. The methods are collectives over the ranks that share the vocabulary."""

    @property
    def start(self) -> int: ...  # first local id

    @property
    def total(self) -> int: ...

    @property
    def max_size(self) -> int: ...  # size of the largest shard

    def all_reduce_sum(self, x: Tensor) -> Tensor: ...  # sum over the ranks, in place

    def all_reduce_max(self, x: Tensor) -> Tensor: ...  # maximum over the ranks, in place

    def all_gather(self, x: Tensor) -> Tensor: ...  # (n, total) from the columns of each rank


class LMHead(Protocol):
    """Output layer of a model, with the logit scale and softcap of its family."""

    @property
    def weight(self) -> Tensor: ...  # (vocab, dim)

    @property
    def scale(self) -> float: ...

    @property
    def softcap(self) -> float | None: ...

    @property
    def vocab_shard(self) -> VocabShard | None: ...  # ids of `raw_logits`; None: all

    @property
    def is_plain_linear(self) -> bool:
        """Whether `raw_logits(x)` is x W^T, without bias or adapter."""
        ...

    def raw_logits(self, x: Tensor) -> Tensor:
        """Logits (n, vocab) for states (n, dim), without scale and softcap."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


def max_over_vocab(x: Tensor, vocab_shard: VocabShard | None) -> Tensor:
    """Maximum (n, 1) over all ids of the vocabulary."""
    maximum = x.amax(-1, keepdim=True) if x.shape[1] else x.new_full((len(x), 1), -torch.inf)
    return maximum if vocab_shard is None else vocab_shard.all_reduce_max(maximum)


def sum_over_ranks(x: Tensor, vocab_shard: VocabShard | None) -> Tensor:
    """Sum over the ranks that share the vocabulary."""
    return x if vocab_shard is None else vocab_shard.all_reduce_sum(x)
