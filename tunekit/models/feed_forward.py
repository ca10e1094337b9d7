"""Dense feed-forward layer."""

from torch import Tensor, nn

from tunekit.kernels.glu import gated_activation
from tunekit.models.linear import Linear, shared_input_linears
from tunekit.models.spec import MLP
from tunekit.models.tp_region import NO_PARALLEL, NoParallel


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    tp_region: NoParallel = NO_PARALLEL  # communication with ranks that hold other hidden channels

    def __init__(self, dim: int, spec: MLP) -> None:
        super().__init__()
        self.act = spec.act
        self.gate_proj = Linear(dim, spec.intermediate_size, bias=spec.bias)
        self.up_proj = Linear(dim, spec.intermediate_size, bias=spec.bias)
        self.down_proj = Linear(spec.intermediate_size, dim, bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        gate_and_up = shared_input_linears((self.gate_proj, self.up_proj), self.tp_region.enter(x))
        return self.tp_region.leave(self.down_proj(gated_activation(self.act, *gate_and_up)))
