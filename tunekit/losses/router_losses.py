"""Auxiliary losses of the routers of a mixture of experts (MoE), which are added to the loss of a recipe."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tunekit.data.dataloader.batch import Batch
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError, check_range
from tunekit.models.decoder import Decoder
from tunekit.models.router_stats import RouterStats
from tunekit.models.spec import DecoderSpec, DenseMoE, FeedForward, Layer, MoE


@dataclass(frozen=True, kw_only=True)
class RouterLosses:
    """Weights of the load-balancing loss and of the z-loss."""

    # Weight of the load-balancing loss of MoE routers (arXiv:2101.03961); null: that of config.json if it has
    # `output_router_logits: true`, else 0
    router_aux_loss_coef: float | None = None
    router_z_loss_coef: float = 0.0  # Weight of the squared log-normalizers of MoE routers (arXiv:2202.08906)

    section: ClassVar[str] = ""  # of the config, for error messages

    def __post_init__(self) -> None:
        check_range(self, "router_aux_loss_coef", "router_z_loss_coef", ge=0)

    def router_coefs(self, spec: DecoderSpec) -> tuple[float, float]:
        """Weights of the load-balancing loss and the z-loss. Raise UserError if a model without experts has one."""
        experts = [ffn for layer in spec.layers if isinstance(ffn := sparse_spec(layer), MoE)]
        for key in ("router_aux_loss_coef", "router_z_loss_coef"):
            if getattr(self, key) and not experts:
                raise UserError(f"{self.section}{key}: this model has no experts. Remove the key.")
        default = experts[0].router_aux_loss_coef if experts else 0.0
        return default if self.router_aux_loss_coef is None else self.router_aux_loss_coef, self.router_z_loss_coef

    def check_routers(self, spec: DecoderSpec, is_compiled: bool) -> None:
        """Raise UserError if router losses are set for a model without experts, or with compiled layers."""
        if any(self.router_coefs(spec)) and is_compiled:
            keys = f"{self.section}router_aux_loss_coef=0 and {self.section}router_z_loss_coef=0"
            raise UserError(f"compile: not compatible with router losses. Set compile=false, or {keys}.")

    def prepare(self, model: Decoder) -> None:
        """Let the routers of a model record what their losses need."""
        self.check_routers(model.spec, model.flatten_rows)
        if any(self.router_coefs(model.spec)):
            model.record_routers()

    def begin_pass(self, model: Decoder, batch: Batch) -> RouterStats | None:
        """Statistics that the next training pass fills; None in evaluation, and without router losses."""
        stats = model.router_stats if torch.is_grad_enabled() else None
        if stats is not None:
            stats.begin(model, batch.token_mask)
        return stats

    def router_loss(self, model: Decoder, stats: RouterStats, weight: float) -> Tensor:
        """Weighted sum of both losses of a pass. Scalar. `weight`: that of the pass in the metrics.

        A rank gets the gradients of its own tokens only.
        """
        losses, (aux_coef, z_coef) = stats.losses(), self.router_coefs(model.spec)
        stats.add_to_means(losses, weight)
        return aux_coef * losses[0] + z_coef * losses[1]

    def pop_metrics(self, model: Decoder, dist: DistributedContext) -> dict[str, Tensor]:
        """Means of the router losses since the last call, over all ranks; empty without any."""
        if (stats := model.router_stats) is None or stats.totals is None:
            return {}
        *sums, count = dist.all_reduce_sum(stats.totals).unbind()
        stats.totals, coefs = None, self.router_coefs(model.spec)
        names = ("aux_loss", "router_z_loss")
        return {name: total / count for name, total, coef in zip(names, sums, coefs, strict=True) if coef}


def sparse_spec(layer: Layer) -> FeedForward | None:
    """Feed-forward spec of a layer; of a dense layer with parallel experts, that of the experts."""
    return layer.ffn.sparse if isinstance(layer.ffn, DenseMoE) else layer.ffn
