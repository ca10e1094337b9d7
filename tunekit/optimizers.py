"""Optimizers that torch lacks: one with eight-bit moments, one for matrices, and one that is several in one."""

from typing import Any

import torch
from torch import Tensor

from tunekit.kernels import adamw8bit
from tunekit.kernels.adamw8bit import BLOCK, Moments, Rule

# Of Keller Jordan: a polynomial that brings singular values near 1 in few rounds, and holds them between 0.7 and 1.2.
POLYNOMIAL = 3.4445, -4.7750, 2.0315
ROUNDS = 5


class Parts(torch.optim.Optimizer):
    """Optimizers that share the weights among them, and are one to a schedule and a checkpoint.

    Groups and states are the same objects here and there; `part` of a group says whose it is.
    """

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        super().__init__([group | {"part": i} for i, part in enumerate(parts) for group in part.param_groups], {})
        self.parts = parts

    def step(self, closure: Any = None) -> Any:
        """One step of each."""
        for i, part in enumerate(self.parts):
            part.state, part.param_groups = self.state, [group for group in self.param_groups if group["part"] == i]
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """All as it was saved: torch casts what is kept for a weight to its dtype, and codes are no such numbers."""
        super().load_state_dict(state_dict)
        weights = (weight for group in self.param_groups for weight in group["params"])
        numbers = (number for group in state_dict["param_groups"] for number in group["params"])
        for weight, number in zip(weights, numbers, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if self.state[weight][name].dtype != value.dtype:
                    self.state[weight][name] = value.to(weight.device, copy=True)


class Each(torch.optim.Optimizer):
    """One weight after the other."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self.move(weight, weight.grad, group)

    def move(self, weight: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError


class EightBit(Each):
    """AdamW that keeps two bytes for a weight (arXiv:2110.02861)."""

    def move(self, weight: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            shape = 2, -(-weight.numel() // BLOCK)
            state["step"] = torch.zeros(())  # on the host, which asks for it
            state["first"], state["second"] = (torch.zeros_like(weight, dtype=torch.uint8) for _ in range(2))
            state["scales"] = torch.zeros(shape, device=weight.device)
        state["step"] += 1
        rule = Rule(group["lr"], group["weight_decay"], group["betas"], group["eps"], int(state["step"]))
        moments = Moments(state["first"].view(-1), state["second"].view(-1), state["scales"])
        adamw8bit.step(weight.detach().view(-1), grad.contiguous().view(-1), moments, rule)


class Orthogonal(Each):
    """Muon: momentum whose singular values are all made alike (kellerjordan.github.io/posts/muon, arXiv:2502.16982).

    torch.optim.Muon is for one matrix; experts are a stack (E, out, in) of them. A step is as long as one of AdamW.
    """

    def move(self, weight: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["momentum"] = torch.zeros_like(weight)
        momentum = state["momentum"].lerp_(grad, 1 - group["momentum"])
        ahead = grad.lerp(momentum, group["momentum"])  # Nesterov
        size = group["lr"] * 0.2 * max(weight.shape[-2:]) ** 0.5
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(orthogonal(ahead).to(weight.dtype), alpha=-size)


def orthogonal(x: Tensor) -> Tensor:
    """The matrices (..., out, in) next to `x` whose singular values are all near 1, by Newton and Schulz in bf16."""
    a, b, c = POLYNOMIAL
    tall = x.shape[-2] > x.shape[-1]
    y = (x.mT if tall else x).bfloat16()
    y = y / y.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for _ in range(ROUNDS):
        square = y @ y.mT
        y = a * y + (b * square + c * square @ square) @ y
    return y.mT if tall else y
