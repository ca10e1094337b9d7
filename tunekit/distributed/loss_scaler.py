"""Loss scaling for fp16: gradients below 6e-8 would be zero in fp16, and above 65,504 infinite.

Micikevicius et al., "Mixed Precision Training" (ICLR 2018). The constants are those of torch.amp.GradScaler.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tunekit.distributed.sharding import to_local

INIT_SCALE = 2.0**16
GROWTH_INTERVAL = 2000  # steps without an overflow, after which the scale is doubled


class LossScaler:
    """Loss scale of compute dtypes with the range of fp32: always 1."""

    scale: float = 1.0

    def unscale(self, parameters: Sequence[Tensor]) -> None:
        """Divide all gradients by the scale."""

    def update(self, grad_norm: Tensor) -> bool:
        """Adapt the scale to the gradient norm of a step. Returns whether the gradients overflowed."""
        return False

    def metrics(self) -> dict[str, float]:
        """Values for the metric line of a step."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class DynamicLossScaler(LossScaler):
    """Loss scale that is halved after an overflow, and doubled after `GROWTH_INTERVAL` steps without one.

    It is a power of two, so scaling rounds nothing. Reads the gradient norm, so the host waits for the device.
    """

    def __init__(self) -> None:
        self.scale, self.num_good_steps, self.num_overflows = INIT_SCALE, 0, 0

    def unscale(self, parameters: Sequence[Tensor]) -> None:
        grads = [to_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_(grads, 1 / self.scale)  # pyright: ignore[reportPrivateImportUsage]

    def update(self, grad_norm: Tensor) -> bool:
        """Adapt the scale. At a scale of 1, scaling does not cause overflows: the step guard handles them."""
        if not math.isfinite(grad_norm.item()) and self.scale > 1:
            self.scale, self.num_good_steps = self.scale / 2, 0
            self.num_overflows += 1
            return True
        self.num_good_steps += 1
        if self.num_good_steps == GROWTH_INTERVAL:
            self.scale, self.num_good_steps = self.scale * 2, 0
        return False

    def metrics(self) -> dict[str, float]:
        return {"loss_scale": self.scale, "num_overflows": self.num_overflows}

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "num_good_steps": self.num_good_steps, "num_overflows": self.num_overflows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self.num_good_steps = float(state["scale"]), int(state["num_good_steps"])
        self.num_overflows = int(state["num_overflows"])
