"""Feed-forward layers: dense, and mixtures of experts (MoE) with router, stacked expert weights, and dense layers."""

from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunekit.kernels.glu import gated_activation
from tunekit.kernels.grouped_mm import copy_by_expert, invert, permute_rows
from tunekit.models.linear import GroupedLinear, Linear, shared_input_linears
from tunekit.models.norm import RMSNorm, make_norm
from tunekit.models.router_stats import RouterStats
from tunekit.models.spec import MLP, DenseMoE, MoE
from tunekit.models.tp_region import NO_PARALLEL, NoParallel
from tunekit.models.weight_init import InitMixin, normal_init

ExpertFn = Callable[[Tensor, Tensor], Tensor]  # outputs of rows (N, dim) with `sizes` (E,) rows per expert


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), or without a gate down(act(up(x)) * up(x))."""

    tp_region: NoParallel = NO_PARALLEL  # communication with ranks that hold other hidden channels

    def __init__(self, dim: int, spec: MLP) -> None:
        super().__init__()
        self.act, self.scales, self.sparsity = spec.act, spec.scales, spec.sparsity
        self.gate_proj = Linear(dim, spec.intermediate_size, bias=spec.bias) if spec.gated else None
        self.up_proj = Linear(dim, spec.intermediate_size, bias=spec.bias)
        self.down_proj = Linear(spec.intermediate_size, dim, bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tp_region.enter(x)
        gate, up = project_gate_and_up(self.gate_proj, self.up_proj, x)
        gate = gate if self.scales[0] == 1 else gate * self.scales[0]
        gate = gate if self.sparsity == 0 else keep_largest(gate, self.sparsity)
        y = self.down_proj(gated_activation(self.act, gate, up))
        return self.tp_region.leave(y if self.scales[1] == 1 else y * self.scales[1])


def keep_largest(x: Tensor, sparsity: float) -> Tensor:
    """Excess of (..., dim) over the quantile `sparsity` of a normal distribution with the same mean and deviation."""
    variance = x.var(dim=-1, keepdim=True, unbiased=False)
    deviation = variance.clamp(min=torch.finfo(x.dtype).tiny).sqrt()  # of a zero vector, it has no derivative
    return F.relu(x - (x.mean(dim=-1, keepdim=True) + deviation * NormalDist().inv_cdf(sparsity)))


def project_gate_and_up(gate_proj: Any, up_proj: Any, *args: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs of both projections for the same input. Without a gate, the second one is its own gate."""
    if gate_proj is None:
        up = up_proj(*args)
        return up, up
    gate, up = shared_input_linears((gate_proj, up_proj), *args)
    return gate, up


class Router(InitMixin):
    """Selects the experts of each token. Its few weights are sensitive: never quantized and never adapted."""

    bias: nn.Parameter | None
    selection_bias: nn.Parameter | None
    scale: nn.Parameter | None
    per_expert_scale: nn.Parameter | None
    stats: RouterStats | None = None  # for auxiliary losses
    # Returns the experts to use (T, top_k), from the logits (T, E) and the chosen ones, to compare two models
    override: Callable[[Tensor, Tensor], Tensor] | None = None

    def __init__(self, dim: int, spec: MoE) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.zeros(spec.experts, dim))
        self.register_parameter("bias", nn.Parameter(torch.zeros(spec.experts)) if spec.router_bias else None)
        # Pretraining updates it from expert loads, not by gradients; fine-tuning keeps it.
        bias = nn.Parameter(torch.zeros(spec.experts), requires_grad=False)
        self.register_parameter("selection_bias", bias if spec.selection_bias else None)
        self.norm = make_norm(dim, spec.router_norm)
        scaled = spec.router_norm is not None
        self.register_parameter("scale", nn.Parameter(torch.ones(dim)) if scaled else None)
        self.register_parameter("per_expert_scale", nn.Parameter(torch.ones(spec.experts)) if scaled else None)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights in fp32 and indices of the experts of each token (T, dim), both (T, top_k)."""
        spec, logits = self.spec, self.logits(x)
        scores = logits
        match spec.scoring_func:
            case "softmax":
                scores = logits.softmax(-1)
            case "sigmoid":
                scores = logits.sigmoid()
        chosen = self.selection_scores(scores.detach()).topk(spec.top_k, dim=-1).indices
        if self.stats is not None and torch.is_grad_enabled():
            self.stats.add(self, logits, chosen)
        if self.override is not None:
            chosen = self.override(logits, chosen)
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
        """Draw normal weights; zero biases and corrections; set scales to 1."""
        self.weight_storage.copy(self.weight, normal_init(self.weight.shape, std, generator))
        for parameter in (self.bias, self.selection_bias):
            if parameter is not None:
                nn.init.zeros_(parameter)
        for parameter in (self.scale, self.per_expert_scale):
            if parameter is not None:
                nn.init.ones_(parameter)

    def logits(self, x: Tensor) -> Tensor:
        """Scores (T, E) in fp32, from a matmul in the dtype that the family uses."""
        if self.scale is not None:
            x = self.norm(x) * self.scale.to(x.dtype) * x.shape[-1] ** -0.5
        x = x.float() if self.spec.router_in_fp32 else x
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype)).float()

    def selection_scores(self, scores: Tensor) -> Tensor:
        """Scores (T, E) for the top-k selection; -inf for experts of excluded groups."""
        spec, groups = self.spec, self.spec.groups
        if self.selection_bias is not None:
            scores = scores + self.selection_bias.float()
        if groups is None:
            return scores
        grouped = scores.unflatten(-1, (groups[0], -1))
        # Group score: its best expert, or the sum of its two best with a selection bias (as in DeepSeek V3).
        group_scores = grouped.topk(2 if spec.selection_bias else 1, dim=-1).values.sum(-1)
        selected_groups = group_scores.topk(groups[1], dim=-1).indices
        is_excluded = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, selected_groups, False)
        return grouped.masked_fill(is_excluded[..., None], float("-inf")).flatten(-2)


class Experts(nn.Module):
    """Feed-forward layers of all experts."""

    dispatcher: "Callable[[ExpertFn, Tensor, Tensor], Tensor] | None" = None  # sends rows to the ranks of their experts

    def __init__(self, dim: int, spec: MoE) -> None:
        super().__init__()
        self.act, self.swiglu = spec.act, spec.swiglu
        sizes = spec.experts, dim, spec.intermediate_size
        self.gate_proj = GroupedLinear(*sizes, spec.bias) if spec.gated else None
        self.up_proj = GroupedLinear(*sizes, spec.bias)
        self.down_proj = GroupedLinear(spec.experts, spec.intermediate_size, dim, spec.bias)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        """Outputs of rows (N, dim) sorted by expert, with `sizes` (E,) rows per expert."""
        if self.dispatcher is None:
            return self.forward_local(x, sizes)
        return self.dispatcher(self.forward_local, x, sizes)

    def forward_local(self, x: Tensor, sizes: Tensor) -> Tensor:
        """Outputs of the experts on this rank."""
        gate, up = project_gate_and_up(self.gate_proj, self.up_proj, x, sizes)
        return self.down_proj(gated_activation(self.act, gate, up, self.swiglu), sizes)


class MixtureOfExperts(nn.Module):
    """Routed experts, plus a shared expert if the family has one."""

    tp_region: NoParallel = NO_PARALLEL  # communication with ranks that hold other hidden channels

    def __init__(self, dim: int, spec: MoE) -> None:
        super().__init__()
        self.spec = spec
        self.router, self.experts = Router(dim, spec), Experts(dim, spec)
        width = spec.shared_intermediate_size
        self.shared = GatedMLP(dim, MLP(width, spec.act, gated=spec.gated)) if width else None
        self.shared_gate = Linear(dim, 1, bias=False) if spec.shared_gate else None

    def forward(self, x: Tensor, router_input: Tensor | None = None) -> Tensor:
        """Outputs (B, S, dim). `router_input` replaces `x` as the input of the router."""
        x, router_input = self.tp_region.enter(x), None if router_input is None else self.tp_region.enter(router_input)
        weights, chosen = self.router((x if router_input is None else router_input).flatten(0, -2))
        y = self.mix_experts(x.flatten(0, -2), weights, chosen).view_as(x)
        if self.shared is not None:
            shared = self.shared(x)
            y = y + (shared if self.shared_gate is None else shared * self.shared_gate(x).sigmoid())
        return self.tp_region.leave(y)

    def mix_experts(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Weighted sum of the outputs of the chosen experts for `x` (T, dim)."""
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
    """Dense layer and experts in parallel. The input is not normalized, because the router reads it."""

    def __init__(self, dim: int, spec: DenseMoE) -> None:
        super().__init__()
        self.dense_norm, self.dense_post_norm = RMSNorm(dim, spec.norm), RMSNorm(dim, spec.norm)
        self.sparse_norm, self.sparse_post_norm = RMSNorm(dim, spec.norm), RMSNorm(dim, spec.norm)
        self.dense, self.sparse = GatedMLP(dim, spec.dense), MixtureOfExperts(dim, spec.sparse)

    def forward(self, x: Tensor) -> Tensor:
        dense = self.dense_post_norm(self.dense(self.dense_norm(x)))
        return dense + self.sparse_post_norm(self.sparse(self.sparse_norm(x), router_input=x))
