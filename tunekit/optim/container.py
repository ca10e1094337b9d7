"""Optimizers that torch lacks: one with eight-bit moments, one for matrices, and one that is several in one.

What they keep for a weight lies where the weight does: each rank keeps that of its part.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tunekit.distributed.sharding import full_tensor, shard_slice, to_local
from tunekit.errors import UserError
from tunekit.kernels import adamw8bit, fake_mode
from tunekit.kernels.adamw8bit import BLOCK, AdamWHyperparams, Moments

# Of Keller Jordan: a polynomial that brings singular values near 1 in few rounds, and holds them between 0.7 and 1.2.
POLYNOMIAL = 3.4445, -4.7750, 2.0315
ROUNDS = 5


class OptimizerContainer(torch.optim.Optimizer):
    """Optimizers that share the weights among them, and are one to a schedule and a checkpoint.

    Groups and states are the same objects here and there; `part` of a group says whose it is.
    """

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        super().__init__([group | {"part": i} for i, part in enumerate(parts) for group in part.param_groups], {})
        self.parts = parts

    def step(self, closure: Any = None) -> Any:
        """One step of each."""
        for i, one in enumerate(self.parts):
            one.state, one.param_groups = self.state, [group for group in self.param_groups if group["part"] == i]
            one.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """All as it was saved: torch casts what is kept for a weight to its dtype, and codes are no such numbers."""
        super().load_state_dict(state_dict)
        weights = (weight for group in self.param_groups for weight in group["params"])
        numbers = (number for group in state_dict["param_groups"] for number in group["params"])
        for weight, number in zip(weights, numbers, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if self.state[weight][name].dtype != value.dtype:
                    self.state[weight][name] = value.to(weight.device, copy=True)


class PerParamOptimizer(torch.optim.Optimizer):
    """One weight after the other."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self.move(weight, weight.grad, group)

    def move(self, weight: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError


class AdamW8bit(PerParamOptimizer):
    """AdamW that keeps two bytes for a weight (arXiv:2110.02861).

    Blocks with one scale end where a row of the whole weight does, so a weight may be divided by rows as one likes.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for weight in self.param_groups[-1]["params"]:
            box, columns = shard_slice(weight), to_local(weight).shape[-1]
            if box.offset[-1] % BLOCK or (columns % BLOCK and box.offset[-1] + columns < box.shape[-1]):
                told = f"rows of {box.shape[-1]} numbers are cut where no block of {BLOCK} ends"
                raise UserError(f"optimizer: adamw8bit: {told}: use adamw, or another parallel.tp")

    def move(self, weight: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, here = self.state[weight], to_local(weight.detach())
        if not state:
            *lead, columns = here.shape
            state["step"] = torch.zeros(())  # on the host, which asks for it
            state["first"], state["second"] = (torch.zeros_like(here, dtype=torch.uint8) for _ in range(2))
            state["scales"] = torch.zeros((2, *lead, -(-columns // BLOCK)), device=here.device)
        if fake_mode.is_fake():  # there is no number that could move
            return
        state["step"] += 1
        rule = AdamWHyperparams(group["lr"], group["weight_decay"], group["betas"], group["eps"], int(state["step"]))
        codes = state["first"].view(-1), state["second"].view(-1)
        moments = Moments(*codes, state["scales"].view(2, -1), here.shape[-1])
        adamw8bit.adamw8bit_step(here.view(-1), to_local(grad).contiguous().view(-1), moments, rule)


class Muon(PerParamOptimizer):
    """Muon: momentum whose singular values are all made alike (kellerjordan.github.io/posts/muon, arXiv:2502.16982).

    torch.optim.Muon is for one matrix; experts are a stack (E, out, in) of them. A step is as long as one of AdamW.
    A matrix that is cut over ranks is gathered; each of them works on some of the matrices, and all get the outcome.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            for weight in weights:
                if not is_cut(weight):
                    self.turn(weight, group, orthogonal(to_local(self.ahead(weight, group))))
            self.exchange([weight for weight in weights if is_cut(weight)], group)

    def exchange(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        """A round for as many weights as there are ranks."""
        ranks = dist.get_world_size() if weights else 1
        for some in (weights[at : at + ranks] for at in range(0, len(weights), ranks)):
            made = [to_local(weight).new_empty(shard_slice(weight).shape, dtype=torch.bfloat16) for weight in some]
            for rank, weight in enumerate(some):
                matrix = full_tensor(self.ahead(weight, group), weight)
                if rank == dist.get_rank():
                    made[rank].copy_(orthogonal(matrix))
            for rank, weight in enumerate(some):
                dist.broadcast(made[rank], rank)
                self.turn(weight, group, shard_slice(weight).slice_local(made[rank], to_local(weight).shape))

    def ahead(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        """The gradient with momentum, one step on (Nesterov)."""
        state, grad = self.state[weight], weight.grad
        assert grad is not None
        if not state:
            state["momentum"] = torch.zeros_like(weight)
        momentum = state["momentum"].lerp_(grad, 1 - group["momentum"])
        return grad.lerp(momentum, group["momentum"])

    def turn(self, weight: Tensor, group: dict[str, Any], direction: Tensor) -> None:
        """Move the part that is here."""
        here, size = to_local(weight.detach()), group["lr"] * 0.2 * max(shard_slice(weight).shape[-2:]) ** 0.5
        here.mul_(1 - group["lr"] * group["weight_decay"])
        here.add_(direction.to(here.dtype), alpha=-size)


def is_cut(weight: Tensor) -> bool:
    """Whether no rank has whole matrices of it."""
    return shard_slice(weight).shape[-2:] != to_local(weight).shape[-2:]


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
