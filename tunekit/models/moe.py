"""Mixtures of experts: a router, experts as stacked weights, and what some families set beside them."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunekit.distributed.collectives import NO_PARALLEL, NoParallel
from tunekit.distributed.sharding import copy_to_shard
from tunekit.kernels.glu import gated_activation
from tunekit.kernels.grouped_mm import copy_by_expert, invert, permute_rows
from tunekit.models.feed_forward import GatedMLP
from tunekit.models.linear import GroupedLinear, Linear, shared_input_linears
from tunekit.models.norm import RMSNorm, make_norm
from tunekit.models.spec import MLP, DenseMoE, MoE
from tunekit.models.weight_init import InitMixin, normal_init

ExpertFn = Callable[[Tensor, Tensor], Tensor]  # what experts make of rows (N, dim), of which each has `sizes` (E,)


class Router(InitMixin):
    """Which experts a token goes to. Its few weights decide much: no format packs them and no adapter is hung on it."""

    bias: nn.Parameter | None
    selection_bias: nn.Parameter | None
    scale: nn.Parameter | None
    per_expert_scale: nn.Parameter | None

    def __init__(self, dim: int, spec: MoE) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.zeros(spec.experts, dim))
        self.register_parameter("bias", nn.Parameter(torch.zeros(spec.experts)) if spec.router_bias else None)
        # Training moves it by rules of its own, from how many tokens each expert had: fine-tuning leaves it alone.
        bias = nn.Parameter(torch.zeros(spec.experts), requires_grad=False)
        self.register_parameter("selection_bias", bias if spec.selection_bias else None)
        self.norm = make_norm(dim, spec.router_norm)
        scaled = spec.router_norm is not None
        self.register_parameter("scale", nn.Parameter(torch.ones(dim)) if scaled else None)
        self.register_parameter("per_expert_scale", nn.Parameter(torch.ones(spec.experts)) if scaled else None)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the experts of every token (T, dim), both (T, top_k), the weights in fp32."""
        spec, logits = self.spec, self.logits(x)
        scores = {"softmax": lambda t: t.softmax(-1), "sigmoid": torch.sigmoid}.get(spec.scoring_func, lambda t: t)(
            logits
        )
        chosen = self.selection_scores(scores.detach()).topk(spec.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        match spec.scoring_func:
            case "top_softmax":
                weights = weights.softmax(-1)
            case "top_sigmoid":
                weights = weights.sigmoid()
        if spec.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        if self.per_expert_scale is not None:
            weights = weights * self.per_expert_scale.float()[chosen]
        return weights * spec.scale, chosen

    def init_weights(self, generator: torch.Generator, std: float) -> None:
        """Normal weights, no corrections."""
        copy_to_shard(self.weight, normal_init(self.weight.shape, std, generator))
        for parameter in (self.bias, self.selection_bias):
            if parameter is not None:
                nn.init.zeros_(parameter)
        for parameter in (self.scale, self.per_expert_scale):
            if parameter is not None:
                nn.init.ones_(parameter)

    def logits(self, x: Tensor) -> Tensor:
        """Scores (T, E) in fp32, from a product in the dtype that the family makes it in."""
        if self.scale is not None:
            x = self.norm(x) * self.scale.to(x.dtype) * x.shape[-1] ** -0.5
        x = x.float() if self.spec.router_in_fp32 else x
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype)).float()

    def selection_scores(self, scores: Tensor) -> Tensor:
        """Scores (T, E) that decide. Of the experts of groups that fall out they are -inf."""
        spec, groups = self.spec, self.spec.groups
        if self.selection_bias is not None:
            scores = scores + self.selection_bias.float()
        if groups is None:
            return scores
        grouped = scores.unflatten(-1, (groups[0], -1))
        # A group is as good as its best expert, or as its two best together where a correction takes part.
        group_scores = grouped.topk(2 if spec.selection_bias else 1, dim=-1).values.sum(-1)
        selected_groups = group_scores.topk(groups[1], dim=-1).indices
        is_excluded = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, selected_groups, False)
        return grouped.masked_fill(is_excluded[..., None], float("-inf")).flatten(-2)


class Experts(nn.Module):
    """The gated feed-forward layers of all experts."""

    dispatcher: "Callable[[ExpertFn, Tensor, Tensor], Tensor] | None" = (
        None  # of rows to the ranks that have their experts
    )

    def __init__(self, dim: int, spec: MoE) -> None:
        super().__init__()
        self.act = spec.act
        self.gate_proj = GroupedLinear(spec.experts, dim, spec.intermediate_size, spec.bias)
        self.up_proj = GroupedLinear(spec.experts, dim, spec.intermediate_size, spec.bias)
        self.down_proj = GroupedLinear(spec.experts, spec.intermediate_size, dim, spec.bias)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        """Rows (N, dim) sorted by expert, of which each has `sizes` (E,)."""
        return (
            self.forward_local(x, sizes) if self.dispatcher is None else self.dispatcher(self.forward_local, x, sizes)
        )

    def forward_local(self, x: Tensor, sizes: Tensor) -> Tensor:
        """What the experts that are here make of their rows."""
        return self.down_proj(
            gated_activation(self.act, *shared_input_linears((self.gate_proj, self.up_proj), x, sizes)), sizes
        )


class MixtureOfExperts(nn.Module):
    """Every token through the experts that the router chose for it, and through a shared one if there is."""

    tp_region: NoParallel = (
        NO_PARALLEL  # of tokens into this layer and out of it, where ranks share the width of experts
    )

    def __init__(self, dim: int, spec: MoE) -> None:
        super().__init__()
        self.spec = spec
        self.router, self.experts = Router(dim, spec), Experts(dim, spec)
        self.shared = (
            GatedMLP(dim, MLP(spec.shared_intermediate_size, spec.act)) if spec.shared_intermediate_size else None
        )
        self.shared_gate = Linear(dim, 1, bias=False) if spec.shared_gate else None

    def forward(self, x: Tensor, router_input: Tensor | None = None) -> Tensor:
        """The router looks at `seen` where that is not `x`."""
        x, router_input = self.tp_region.enter(x), None if router_input is None else self.tp_region.enter(router_input)
        weights, chosen = self.router((x if router_input is None else router_input).flatten(0, -2))
        y = self.mix_experts(x.flatten(0, -2), weights, chosen).view_as(x)
        if self.shared is not None:
            shared = self.shared(x)
            y = y + (shared if self.shared_gate is None else shared * self.shared_gate(x).sigmoid())
        return self.tp_region.leave(y)

    def mix_experts(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Outputs of the chosen experts of `x` (T, dim), added up with their weights."""
        weights = weights if self.spec.router_in_fp32 else weights.type_as(x)
        expert, order = chosen.flatten().sort(stable=True)
        inverse = invert(order)
        ends = torch.searchsorted(expert, torch.arange(self.spec.experts, device=x.device), right=True)
        sizes = ends.diff(prepend=ends.new_zeros(1))
        rows = copy_by_expert(x, order, inverse, self.spec.top_k)
        if self.spec.apply_router_weight_on_input:
            rows = (rows * permute_rows(weights.view(-1, 1), order, inverse)).type_as(x)
        y = permute_rows(self.experts(rows, sizes), inverse, order).unflatten(0, chosen.shape)
        if not self.spec.apply_router_weight_on_input:
            y = y * weights[..., None]
        return y.sum(1).type_as(x)


class DenseMoEFeedForward(nn.Module):
    """A dense layer and experts side by side. The input comes without a norm: the router looks at it as it is."""

    def __init__(self, dim: int, spec: DenseMoE) -> None:
        super().__init__()
        self.dense_norm, self.dense_post_norm = RMSNorm(dim, spec.norm), RMSNorm(dim, spec.norm)
        self.sparse_norm, self.sparse_post_norm = RMSNorm(dim, spec.norm), RMSNorm(dim, spec.norm)
        self.dense, self.sparse = GatedMLP(dim, spec.dense), MixtureOfExperts(dim, spec.sparse)

    def forward(self, x: Tensor) -> Tensor:
        dense = self.dense_post_norm(self.dense(self.dense_norm(x)))
        return dense + self.sparse_post_norm(self.sparse(self.sparse_norm(x), seen=x))
