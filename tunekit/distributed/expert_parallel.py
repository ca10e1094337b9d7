"""Experts that live on different ranks: rows travel to those that have theirs, and back (arXiv:2006.16668)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunekit.distributed.collectives import MeshDim, all_to_all
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.shard_param import shard_parameters
from tunekit.errors import UserError
from tunekit.kernels import fake_mode
from tunekit.kernels.grouped_mm import even_split, invert, permute_rows
from tunekit.models.decoder import Decoder
from tunekit.models.linear import GroupedLinear
from tunekit.models.moe import Experts

# Of all that has an expert for its first dimension.
STACKED = {"weight": 0, "packed": 0, "scales": 0, "bias": 0, "lora_A": 0, "lora_B": 0}


def apply_expert_parallel(model: Decoder, run: DistributedContext) -> None:
    if run.experts is not None:
        shard_experts(model, MeshDim.along(run.experts, "expert"))


def shard_experts(model: Decoder, team: MeshDim) -> None:
    """Leave of all experts those of this rank."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, Experts)}
    if not found:
        raise UserError("parallel.ep: this model has no experts: leave it out")
    for name, module in found.items():
        module.travel = TokenDispatcher(team, module.gate_proj.experts)
        for leaf, layer in module.named_children():
            divide(model, f"{name}.{leaf}", layer, team)


def divide(model: Decoder, name: str, layer: nn.Module, team: MeshDim) -> None:
    assert isinstance(layer, GroupedLinear)
    if layer.experts % team.size:
        told = f"{team.size} devices cannot share the {layer.experts} experts of {name} alike"
        raise UserError(f"parallel.ep: {told}: choose a number that divides {layer.experts}")
    if "outer" in dict(layer.named_parameters()):
        raise UserError(
            f"parallel.ep: {name} has scales that were packed together: set quantization.double_quant to false"
        )
    sizes = team.even(layer.experts)
    layer.experts = sizes[team.index]
    shard_parameters(model, name, STACKED, sizes, team, "expert")


@dataclass(frozen=True, eq=False)
class TokenDispatcher:
    """How rows get to their experts.

    A rank adds up gradients from the tokens of a whole team, and sharding then takes the mean of fewer ranks than those
    whose tokens were seen: on their way to an expert gradients are made so much smaller, and behind it larger again.
    """

    team: MeshDim
    experts: int  # on all ranks

    def __call__(self, made: Callable[[Tensor, Tensor], Tensor], x: Tensor, sizes: Tensor) -> Tensor:
        """What experts make of rows (N, dim) sorted by expert, of which each of them all has `sizes` (E,)."""
        team, here = self.team, self.experts // self.team.size
        counts = torch.empty_like(sizes)
        team.swap(counts, sizes)
        there, back = rows_of(torch.stack([sizes, counts]).view(2, team.size, here), len(x))  # the host waits once
        rows = all_to_all(x, there, back, team, team.size)
        # They came by rank, and by expert from each: now by expert alone. An expert that gets nothing learns nothing,
        # but one row there must be for all gradients to be.
        expert = torch.arange(here, device=x.device).repeat(team.size)
        expert = expert.repeat_interleave(counts, output_size=len(rows))
        order = expert.argsort(stable=True)
        own = counts.view(team.size, here).sum(0)
        if not len(rows):
            y = made(F.pad(rows, (0, 0, 0, 1)), F.pad(own[:-1], (0, 1), value=1))[:0]
        else:
            inverse = invert(order)
            y = permute_rows(made(permute_rows(rows, order, inverse), own), inverse, order)
        return all_to_all(y, back, there, team, 1 / team.size)


def rows_of(counts: Tensor, total: int) -> list[list[int]]:
    """Rows for each rank, and from each, of the counts (2, ranks, experts)."""
    return [even_split(total, counts.shape[1])] * 2 if fake_mode.is_fake() else counts.sum(-1).tolist()
