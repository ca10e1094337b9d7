"""Statistics of the routers of a mixture of experts (MoE), for their auxiliary losses."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.models.forward_context import UNSHARDED, SequenceSharding
from tunekit.models.tp_region import NO_PARALLEL, NoParallel


class RouterModel(Protocol):
    """Distribution of the tokens of a model over ranks."""

    cp_sharding: SequenceSharding
    tp_region: NoParallel


class RouterStats:
    """Sums over the tokens of a forward pass, by router. Each token is counted on one rank.

    Routers keep the first sums of a pass: recomputation in the backward pass must not replace them.
    """

    def __init__(self) -> None:
        # By router, (2 * experts + 1,): tokens per expert, probabilities per expert, squared log-normalizers.
        self.sums: dict[object, Tensor] = {}
        self.mask = torch.ones(0)  # (tokens,) of this rank
        self.cp_sharding, self.tp_region = UNSHARDED, NO_PARALLEL
        # (3,): weighted sums of both losses, and the sum of the weights of micro-batches, since the last metrics.
        self.totals: Tensor | None = None

    def begin(self, model: RouterModel, token_mask: Tensor) -> None:
        """Start a pass over tokens (B, S), of which padding is not counted."""
        self.cp_sharding, self.tp_region = model.cp_sharding, model.tp_region
        self.mask = self.tp_region.local_tokens(self.cp_sharding.local_tokens(token_mask.float())).flatten()
        self.sums = {}

    def add(self, router: object, logits: Tensor, chosen: Tensor) -> None:
        """Add the tokens of a router: logits (T, E), and chosen experts (T, top_k)."""
        size = len(logits) // len(self.mask)  # above 1: tensor parallel ranks route the same tokens
        before, after = self.tp_region.index * len(self.mask), (size - 1 - self.tp_region.index) * len(self.mask)
        mask = self.mask if size == 1 else F.pad(self.mask, (before, after))
        counts = logits.new_zeros(logits.shape[-1])
        counts = counts.index_add(0, chosen.flatten(), mask.repeat_interleave(chosen.shape[-1]))
        z = mask @ logits.logsumexp(-1).square()
        self.sums.setdefault(router, torch.cat([counts, mask @ logits.softmax(-1), z[None]]))

    def losses(self) -> Tensor:
        """Load-balancing loss over the tokens of all layers (arXiv:2101.03961), and z-loss (arXiv:2202.08906), (2,).

        A rank gets the gradients of its own tokens only.
        """
        sums, num_layers = torch.stack([*self.sums.values()]).sum(0), len(self.sums)
        sums = torch.cat([sums, self.mask.sum()[None] * num_layers])
        sums = self.cp_sharding.all_reduce_sum(self.tp_region.all_reduce_sum(sums))
        experts = (len(sums) - 2) // 2
        counts, probs, z, tokens = sums.split([experts, experts, 1, 1])
        tokens = tokens.clamp_min(1)
        return torch.cat([experts * (counts / tokens * (probs / tokens)).sum()[None], z / tokens])

    def add_to_means(self, losses: Tensor, weight: float) -> None:
        """Add the losses (2,) of a micro-batch, with its weight in the means."""
        added = torch.cat([losses.detach(), losses.new_ones(1)]) * weight
        self.totals = added if self.totals is None else self.totals + added
