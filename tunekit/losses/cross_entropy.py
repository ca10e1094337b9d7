"""Cross-entropy of target tokens. Losses are sums: the recipe divides once, by the global number of target tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tunekit.data.dataloader.batch import IGNORE, Batch
from tunekit.data.dataloader.build import DataLoader
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError, UserError
from tunekit.kernels import fake_mode
from tunekit.kernels.cross_entropy import ChunkLoss, CrossEntropyTerms, CustomChunkLoss, linear_cross_entropy
from tunekit.losses.metric_sums import eval_steps
from tunekit.models.decoder import Decoder, Head
from tunekit.models.spec import DecoderSpec, DenseMoE, FeedForward, Layer, MoE


@dataclass(frozen=True)
class CrossEntropy:
    """Negative log-likelihood of the target tokens, in nats."""

    label_smoothing: float = 0.0  # Probability mass of the target that is spread evenly over the vocabulary
    z_loss: float = 0.0  # Weight of the squared log-normalizer, which keeps logits from drifting
    # Weight of the load-balancing loss of MoE routers (arXiv:2101.03961); null: that of config.json if it has
    # `output_router_logits: true`, else 0
    router_aux_loss_coef: float | None = None
    router_z_loss_coef: float = 0.0  # Weight of the squared log-normalizers of MoE routers (arXiv:2202.08906)

    # Subclasses may define `measure(logits, targets)`: fp32 logits (n, vocab) and targets (n,) to a scalar sum.
    measure: ClassVar[Callable[..., Tensor] | None] = None

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise FieldError("label_smoothing", f"must be >= 0 and < 1, got {self.label_smoothing}")
        for key in ("router_aux_loss_coef", "router_z_loss_coef"):
            if (getattr(self, key) or 0) < 0:
                raise FieldError(key, f"must be >= 0, got {getattr(self, key)}")

    def router_coefs(self, spec: DecoderSpec) -> tuple[float, float]:
        """Weights of the load-balancing loss and the z-loss. Raise UserError if a model without experts has one."""
        experts = [ffn for layer in spec.layers if isinstance(ffn := sparse_spec(layer), MoE)]
        for key in ("router_aux_loss_coef", "router_z_loss_coef"):
            if getattr(self, key) and not experts:
                raise UserError(f"loss.{key}: this model has no experts. Remove the key.")
        default = experts[0].router_aux_loss_coef if experts else 0.0
        return default if self.router_aux_loss_coef is None else self.router_aux_loss_coef, self.router_z_loss_coef

    def check_routers(self, spec: DecoderSpec, is_compiled: bool) -> None:
        """Raise UserError if router losses are set for a model without experts, or with compiled layers."""
        if any(self.router_coefs(spec)) and is_compiled:
            remedy = "Set compile=false, or loss.router_aux_loss_coef=0 and loss.router_z_loss_coef=0."
            raise UserError(f"compile: not compatible with router losses. {remedy}")

    def prepare(self, model: Decoder) -> None:
        """Let the routers of a model record what their losses need."""
        self.check_routers(model.spec, model.flatten_rows)
        if any(self.router_coefs(model.spec)):
            model.record_routers()

    def __call__(self, model: Decoder, batch: Batch) -> Tensor:
        """Sum of the loss over the target tokens of a batch. In training, each has the router losses added to it."""
        targets, target_rows = local_targets(model, batch)
        weights = batch.loss_weights
        if weights is not None:
            if self.measure is not None:
                batch.require_equal_weights()
            weights = model.cp_sharding.local_tokens(weights, 0).flatten().index_select(0, target_rows)
        stats = model.router_stats if torch.is_grad_enabled() else None
        if stats is not None:
            stats.begin(model, batch.token_mask)

        def read(hidden: Tensor, head: Head) -> Tensor:
            args = hidden.flatten(0, 1), targets, head, self.chunk_loss(head), target_rows, weights
            return linear_cross_entropy(*args)

        loss = model(batch.tokens, batch.positions, batch.layout, head_fn=read, sharded=True)
        if stats is None:
            return loss
        router_losses = stats.losses()
        stats.add_to_means(router_losses, target_rows.numel())
        local_sum = target_rows.numel() if weights is None else weights.sum()
        aux_coef, z_coef = self.router_coefs(model.spec)
        total = aux_coef * router_losses[0] + z_coef * router_losses[1]
        # CP ranks have the same value, which counts once, and gradients of their own tokens.
        return loss + total * batch.loss_denominator - total.detach() * (batch.loss_denominator - local_sum)

    def pop_metrics(self, model: Decoder, dist: DistributedContext) -> dict[str, Tensor]:
        """Means of the router losses since the last call, over the target tokens of all ranks; empty without any."""
        if (stats := model.router_stats) is None or stats.totals is None:
            return {}
        *sums, num_targets = dist.all_reduce_sum(stats.totals).unbind()
        stats.totals, coefs = None, self.router_coefs(model.spec)
        names = ("aux_loss", "router_z_loss")
        return {name: total / num_targets for name, total, coef in zip(names, sums, coefs, strict=True) if coef}

    def chunk_loss(self, head: Head) -> ChunkLoss:
        """Loss of a chunk of logits."""
        if self.measure is not None:
            return CustomChunkLoss(self.measure, head.scale_logits, head.vocab_shard)
        return CrossEntropyTerms(head.scale, head.softcap, self.label_smoothing, self.z_loss, head.vocab_shard)


def sparse_spec(layer: Layer) -> FeedForward | None:
    """Feed-forward spec of a layer; of a dense layer with parallel experts, that of the experts."""
    return layer.ffn.sparse if isinstance(layer.ffn, DenseMoE) else layer.ffn


def local_targets(model: Decoder, batch: Batch) -> tuple[Tensor, Tensor]:
    """Targets (N,) of the tokens of this rank, and the indices of those that are not IGNORE."""
    targets = model.cp_sharding.local_tokens(batch.targets, IGNORE).flatten()
    target_mask, is_complete = targets != IGNORE, targets.numel() == batch.targets.numel()
    # The host knows the number of targets of complete rows; counting them on a GPU would synchronize.
    count = batch.num_target_tokens if is_complete else fake_mode.count_true(target_mask)
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
