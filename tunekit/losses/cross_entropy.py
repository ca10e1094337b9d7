"""Cross-entropy of target tokens. Losses are sums: the recipe divides once, by the global number of target tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tunekit.data.dataloader.batch import IGNORE, Batch
from tunekit.data.dataloader.build import DataLoader
from tunekit.distributed.context import DistributedContext
from tunekit.errors import check_range
from tunekit.kernels import fake_mode
from tunekit.kernels.cross_entropy import ChunkLoss, CrossEntropyTerms, CustomChunkLoss, linear_cross_entropy
from tunekit.losses.metric_sums import eval_steps
from tunekit.losses.router_losses import RouterLosses
from tunekit.models.decoder import Decoder, Head


@dataclass(frozen=True)
class CrossEntropy(RouterLosses):
    """Negative log-likelihood of the target tokens, in nats."""

    label_smoothing: float = 0.0  # Probability mass of the target that is spread evenly over the vocabulary
    z_loss: float = 0.0  # Weight of the squared log-normalizer, which keeps logits from drifting

    section: ClassVar[str] = "loss."
    # Subclasses may define `measure(logits, targets)`: fp32 logits (n, vocab) and targets (n,) to a scalar sum.
    measure: ClassVar[Callable[..., Tensor] | None] = None

    def __post_init__(self) -> None:
        check_range(self, "label_smoothing", ge=0, lt=1)
        super().__post_init__()

    def __call__(self, model: Decoder, batch: Batch) -> Tensor:
        """Sum of the loss over the target tokens of a batch. In training, each has the router losses added to it."""
        targets, target_rows = local_targets(model, batch)
        weights = None
        if batch.loss_weights is not None:
            if self.measure is not None:
                batch.require_equal_weights()
            local_weights = model.cp_sharding.local_tokens(batch.loss_weights.values, 0)
            weights = local_weights.flatten().index_select(0, target_rows)
        stats = self.begin_pass(model, batch)

        def read(hidden: Tensor, head: Head) -> Tensor:
            args = hidden.flatten(0, 1), targets, head, self.chunk_loss(head), target_rows, weights
            return linear_cross_entropy(*args)

        loss = model(batch.tokens, batch.positions, batch.layout, head_fn=read, sharded=True)
        if stats is None:
            return loss
        total = self.router_loss(model, stats, batch.loss_denominator)
        local_sum = target_rows.numel() if weights is None else weights.sum()
        # CP ranks have the same value, which counts once, and gradients of their own tokens.
        return loss + total * batch.loss_denominator - total.detach() * (batch.loss_denominator - local_sum)

    def chunk_loss(self, head: Head) -> ChunkLoss:
        """Loss of a chunk of logits."""
        if self.measure is not None:
            return CustomChunkLoss(self.measure, head.scale_logits, head.vocab_shard)
        return CrossEntropyTerms(head.scale, head.softcap, self.label_smoothing, self.z_loss, head.vocab_shard)


def local_targets(model: Decoder, batch: Batch, full: bool = False) -> tuple[Tensor, Tensor]:
    """Targets (N,) of the tokens of this rank, and the indices of those that are not IGNORE.

    `full` includes the prompts of chosen rows.
    """
    all_targets, count = (
        (batch.targets_with_prompts, batch.documents.num_targets_with_prompts)
        if full
        else (batch.targets, batch.num_target_tokens)
    )
    targets = model.cp_sharding.local_tokens(all_targets, IGNORE).flatten()
    target_mask = targets != IGNORE
    # The host knows the number of targets of complete rows; counting them on a GPU would synchronize.
    if count is None or targets.numel() != all_targets.numel():
        count = fake_mode.count_true(target_mask)
    return targets, target_mask.nonzero_static(size=count).squeeze(1)


@torch.no_grad()
def eval_loss(
    loss: Callable[[Decoder, Batch], Tensor], model: Decoder, data: DataLoader, dist: DistributedContext
) -> float:
    """Mean loss per target token over all rows and ranks, in nats, weighted if tokens have weights."""
    total, denominator = torch.zeros((), device=dist.device), 0.0
    for batches in eval_steps(model, data, dist):
        for batch in batches:
            total += loss(model, batch.to(dist.device))
            denominator += batch.loss_denominator
    return float(dist.all_reduce_sum(total)) / dist.sum_numbers(denominator)[0]
