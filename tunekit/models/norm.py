"""The norm of every model."""

from torch import Tensor, nn, ones

from tunekit.kernels.norm import rms_norm
from tunekit.models.spec import Norm


class RMSNorm(nn.Module):
    """Root mean square norm over the last axis (..., dim)."""

    def __init__(self, dim: int, spec: Norm) -> None:
        super().__init__()
        self.spec = spec
        self.register_parameter("weight", nn.Parameter(ones(dim)) if spec.weight else None)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.spec.eps, self.spec.offset, self.spec.late)


def norm(dim: int, spec: Norm | None) -> nn.Module:
    """A norm, or nothing that does nothing."""
    return nn.Identity() if spec is None else RMSNorm(dim, spec)
