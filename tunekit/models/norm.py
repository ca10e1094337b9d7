"""RMS norm, with or without centering."""

import torch
from torch import Tensor, nn

from tunekit.kernels.rms_norm import rms_norm
from tunekit.models.spec import Norm
from tunekit.models.weight_init import InitMixin


class RMSNorm(InitMixin):
    """Root mean square norm over the last axis (..., dim)."""

    weight: nn.Parameter | None

    def __init__(self, dim: int, spec: Norm) -> None:
        super().__init__()
        self.spec = spec
        self.register_parameter("weight", nn.Parameter(torch.ones(dim)) if spec.weight else None)

    def forward(self, x: Tensor) -> Tensor:
        if self.spec.centered:
            centered = x.float() - x.float().mean(-1, keepdim=True)
            return rms_norm(centered, self.weight, self.spec.eps, self.spec.offset, True).type_as(x)
        return rms_norm(x, self.weight, self.spec.eps, self.spec.offset, self.spec.scale_in_fp32)

    def init_weights(self, generator: torch.Generator, std: float) -> None:
        """Set the scale to 1."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1 - self.spec.offset)


def make_norm(dim: int, spec: Norm | None) -> nn.Module:
    """RMS norm, or the identity without a spec."""
    return nn.Identity() if spec is None else RMSNorm(dim, spec)
