"""The dense feed-forward part of a block."""

from torch import Tensor, nn

from tunekit.distributed.collectives import NO_PARALLEL, NoParallel
from tunekit.kernels.glu import gated_activation
from tunekit.models.linear import Linear, shared_input_linears
from tunekit.models.spec import MLP


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    tp_region: NoParallel = NO_PARALLEL  # of tokens into this layer and out of it, where ranks share its width

    def __init__(self, dim: int, spec: MLP) -> None:
        super().__init__()
        self.act = spec.act
        self.gate_proj = Linear(dim, spec.intermediate_size, bias=spec.bias)
        self.up_proj = Linear(dim, spec.intermediate_size, bias=spec.bias)
        self.down_proj = Linear(spec.intermediate_size, dim, bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = gated_activation(
            self.act, *shared_input_linears((self.gate_proj, self.up_proj), self.tp_region.enter(x))
        )
        return self.tp_region.leave(self.down_proj(hidden))
