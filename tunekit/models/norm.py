"""The norm of every model."""

import torch
from torch import Tensor, nn

from tunekit.kernels.norm import rms_norm
from tunekit.models.init import Fresh
from tunekit.models.spec import Norm


class RMSNorm(Fresh):
    """Root mean square norm over the last axis (..., dim)."""

    weight: nn.Parameter | None

    def __init__(self, dim: int, spec: Norm) -> None:
        super().__init__()
        self.spec = spec
        self.register_parameter("weight", nn.Parameter(torch.ones(dim)) if spec.weight else None)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.spec.eps, self.spec.offset, self.spec.late)

    def reset(self, generator: torch.Generator, std: float) -> None:
        """A fresh norm changes no scale."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1 - self.spec.offset)


def norm(dim: int, spec: Norm | None) -> nn.Module:
    """A norm, or nothing that does nothing."""
    return nn.Identity() if spec is None else RMSNorm(dim, spec)
