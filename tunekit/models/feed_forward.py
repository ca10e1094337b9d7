"""Dense feed-forward layer."""

from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunekit.kernels.glu import gated_activation
from tunekit.models.linear import Linear, shared_input_linears
from tunekit.models.spec import MLP
from tunekit.models.tp_region import NO_PARALLEL, NoParallel


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
