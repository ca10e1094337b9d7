"""Optimizers that torch lacks: AdamW with 8-bit moments, Muon, and a container of several optimizers.

Optimizer state is sharded like the weights: each rank stores the state of its shard.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tunekit.distributed.sharding import full_tensor, shard_slice, to_local
from tunekit.errors import UserError
from tunekit.kernels import adamw8bit, fake_mode
from tunekit.kernels.adamw8bit import BLOCK, AdamWHyperparams, Moments

# Quintic polynomial of Keller Jordan. Moves singular values into [0.7, 1.2] within 5 iterations.
NEWTON_SCHULZ_COEFFICIENTS = 3.4445, -4.7750, 2.0315
NEWTON_SCHULZ_STEPS = 5


class OptimizerContainer(torch.optim.Optimizer):
    """Several optimizers of disjoint weights, which schedules and checkpoints see as one.

    Groups and state are shared with the members; the key `part` of a group is the index of its optimizer.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        groups = [group | {"part": i} for i, member in enumerate(optimizers) for group in member.param_groups]
        super().__init__(groups, {})
        self.optimizers = optimizers

    def step(self, closure: Any = None) -> Any:
        """Step all optimizers."""
        for i, member in enumerate(self.optimizers):
            member.state = self.state
            member.param_groups = [group for group in self.param_groups if group["part"] == i]
            member.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state and restore its dtypes: torch casts state to the dtype of the weight, which destroys codes."""
        super().load_state_dict(state_dict)
        weights = (weight for group in self.param_groups for weight in group["params"])
        indices = (index for group in state_dict["param_groups"] for index in group["params"])
        for weight, index in zip(weights, indices, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if self.state[weight][name].dtype != value.dtype:
                    self.state[weight][name] = value.to(weight.device, copy=True)


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with 8-bit moments, 2 bytes per weight (arXiv:2110.02861).

    Quantization blocks do not cross rows of the full weight, so weights can be sharded along dim 0.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for weight in self.param_groups[-1]["params"]:
            shard, columns = shard_slice(weight), to_local(weight).shape[-1]
            if shard.offset[-1] % BLOCK or (columns % BLOCK and shard.offset[-1] + columns < shard.shape[-1]):
                problem = f"rows of {shard.shape[-1]} values are sharded inside a block of {BLOCK}"
                raise UserError(f"optimizer: adamw8bit: {problem}. Set optimizer=adamw, or another parallel.tp.")

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the weights that have a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self.update(weight, weight.grad, group)

    def update(self, weight: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """Update one weight and its moments."""
        state, local = self.state[weight], to_local(weight.detach())
        if not state:
            *lead, columns = local.shape
            state["step"] = torch.zeros(())  # on the host, which reads it in each step
            state["first"], state["second"] = (torch.zeros_like(local, dtype=torch.uint8) for _ in range(2))
            state["scales"] = torch.zeros((2, *lead, -(-columns // BLOCK)), device=local.device)
        if fake_mode.is_fake():  # fake tensors have no values to update
            return
        state["step"] += 1
        hyperparams = AdamWHyperparams(
            group["lr"], group["weight_decay"], group["betas"], group["eps"], int(state["step"])
        )
        codes = state["first"].view(-1), state["second"].view(-1)
        moments = Moments(*codes, state["scales"].view(2, -1), local.shape[-1])
        adamw8bit.adamw8bit_step(local.view(-1), to_local(grad).contiguous().view(-1), moments, hyperparams)


class Muon(torch.optim.Optimizer):
    """Muon: orthogonalized Nesterov momentum (kellerjordan.github.io/posts/muon, arXiv:2502.16982).

    Unlike torch.optim.Muon, it supports stacked expert matrices (E, out, in). Updates have the RMS of AdamW updates.
    Sharded matrices are gathered; each rank orthogonalizes some of them and broadcasts the result.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            for weight in weights:
                if not is_sharded_matrix(weight):
                    self.apply_update(weight, group, orthogonalize(to_local(self.nesterov_gradient(weight, group))))
            self.step_sharded([weight for weight in weights if is_sharded_matrix(weight)], group)

    def step_sharded(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        """Update sharded weights, one per rank at a time."""
        ranks = dist.get_world_size() if weights else 1
        for chunk in (weights[i : i + ranks] for i in range(0, len(weights), ranks)):
            updates = [to_local(weight).new_empty(shard_slice(weight).shape, dtype=torch.bfloat16) for weight in chunk]
            for rank, weight in enumerate(chunk):
                matrix = full_tensor(self.nesterov_gradient(weight, group), weight)
                if rank == dist.get_rank():
                    updates[rank].copy_(orthogonalize(matrix))
            for rank, weight in enumerate(chunk):
                dist.broadcast(updates[rank], rank)
                self.apply_update(weight, group, shard_slice(weight).slice_local(updates[rank], to_local(weight).shape))

    def nesterov_gradient(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        """Update the momentum and return the gradient with Nesterov momentum."""
        state, grad = self.state[weight], weight.grad
        assert grad is not None
        if not state:
            state["momentum"] = torch.zeros_like(weight)
        momentum = state["momentum"].lerp_(grad, 1 - group["momentum"])
        return grad.lerp(momentum, group["momentum"])

    def apply_update(self, weight: Tensor, group: dict[str, Any], direction: Tensor) -> None:
        """Apply weight decay and the update to the local shard. 0.2 √max(out, in) matches the RMS of AdamW updates."""
        local, step_size = to_local(weight.detach()), group["lr"] * 0.2 * max(shard_slice(weight).shape[-2:]) ** 0.5
        local.mul_(1 - group["lr"] * group["weight_decay"])
        local.add_(direction.to(local.dtype), alpha=-step_size)


def is_sharded_matrix(weight: Tensor) -> bool:
    """Whether the matrices themselves are sharded, not only the stack of matrices."""
    return shard_slice(weight).shape[-2:] != to_local(weight).shape[-2:]


def orthogonalize(x: Tensor) -> Tensor:
    """Set all singular values of matrices (..., out, in) to about 1, by Newton-Schulz iterations in bf16."""
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    is_tall = x.shape[-2] > x.shape[-1]
    y = (x.mT if is_tall else x).bfloat16()
    y = y / y.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = y @ y.mT
        y = a * y + (b * square + c * square @ square) @ y
    return y.mT if is_tall else y
