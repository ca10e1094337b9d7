"""Losses with the memory of preference, reward, embedding and distillation losses, which need no real rows."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tunekit.data.dataloader.batch import Batch
from tunekit.kernels.cross_entropy import token_logps_and_entropies
from tunekit.kernels.kl_divergence import FullTargets
from tunekit.losses.cross_entropy import CrossEntropy, local_targets
from tunekit.losses.embedding import EmbeddingLoss
from tunekit.losses.kl_divergence import KLDivergenceLoss
from tunekit.models.decoder import Decoder, Head
from tunekit.models.spec import DecoderSpec

HEADS: WeakKeyDictionary[Decoder, Head] = WeakKeyDictionary()


def preference_loss(model: Decoder, batch: Batch) -> Tensor:
    """Log-probabilities and entropies of all tokens, as preference losses compute them."""
    targets, rows = local_targets(model, batch)

    def read(hidden: Tensor, head: Head) -> Tensor:
        return -token_logps_and_entropies(hidden.flatten(0, 1), targets, head, rows)[0].sum()

    return run_forward(model, batch, read)


def reward_loss(model: Decoder, batch: Batch) -> Tensor:
    """Scores of all tokens, as reward models compute them."""
    return run_forward(model, batch, lambda hidden, head: head(hidden).float().sum())


def embedding_loss(model: Decoder, batch: Batch) -> Tensor:
    """Hidden states of all tokens in fp32, as pooling reads them. The similarities of a step are not counted."""
    return run_forward(model, batch, lambda hidden, head: hidden.float().sum())


def run_forward(model: Decoder, batch: Batch, head_fn: Callable[[Tensor, Head], Tensor]) -> Tensor:
    return model(batch.tokens, batch.positions, batch.layout, head_fn=head_fn, sharded=True)


@dataclass(frozen=True)
class ProxyDistillLoss:
    """KL divergence to a teacher with a head of its own. The weights of the teacher are counted elsewhere.

    Uses the full vocabulary, which overestimates teachers that provide only their top tokens.
    """

    loss: KLDivergenceLoss

    def __call__(self, model: Decoder, batch: Batch) -> Tensor:
        head = build_teacher(model)
        count = model.cp_sharding.local_tokens(batch.tokens).numel()
        return self.loss(model, batch, FullTargets(head.weight.new_empty(count, model.spec.dim), head))[0]


def build_teacher(model: Decoder) -> Head:
    """Head of the teacher in the compute dtype, cached so that no step allocates it."""
    if model not in HEADS:
        HEADS[model] = head = Head(replace(model.spec, dim=1))
        dtype = model.compute_dtype or model.embed.weight.dtype
        head.weight = nn.Parameter(torch.empty(model.head.weight.shape, dtype=dtype), requires_grad=False)
        head.vocab_shard = model.head.vocab_shard
    return HEADS[model]


def proxy_loss(loss: Any, spec: DecoderSpec, has_reference: bool) -> Any:
    """Return the loss of a config, or its proxy for other losses than cross-entropy."""
    if isinstance(loss, EmbeddingLoss):
        return embedding_loss
    if isinstance(loss, CrossEntropy):
        return loss
    if isinstance(loss, KLDivergenceLoss):
        return ProxyDistillLoss(loss)
    if spec.score is not None:
        return reward_loss
    return preference_loss if has_reference else CrossEntropy()
