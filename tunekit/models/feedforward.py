"""The dense feed-forward part of a block."""

from torch import Tensor, nn

from tunekit.kernels.glu import gated
from tunekit.models.linear import Linear, together
from tunekit.models.spec import MLP


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, dim: int, spec: MLP) -> None:
        super().__init__()
        self.act = spec.act
        self.gate_proj = Linear(dim, spec.hidden, bias=spec.bias)
        self.up_proj = Linear(dim, spec.hidden, bias=spec.bias)
        self.down_proj = Linear(spec.hidden, dim, bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gated(self.act, *together((self.gate_proj, self.up_proj), x)))
