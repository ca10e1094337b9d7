"""Expert parallelism: experts are split over ranks and rows are sent to their experts (arXiv:2006.16668)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunekit.distributed.collectives import MeshDim, all_to_all, check_splittable, shard_parameters
from tunekit.errors import UserError
from tunekit.kernels import fake_mode
from tunekit.kernels.grouped_mm import even_split, invert, permute_rows
from tunekit.models.decoder import Decoder
from tunekit.models.feed_forward import Experts
from tunekit.models.linear import GroupedLinear

# Dimension of the experts in each tensor of a grouped linear layer.
EXPERT_DIMS = {"weight": 0, "quantized_weight": 0, "scales": 0, "bias": 0, "lora_A": 0, "lora_B": 0}


def shard_experts(model: Decoder, mesh_dim: MeshDim) -> None:
    """Keep the experts of this rank and dispatch rows between ranks. Raise UserError if experts cannot be split."""
    experts = {name: module for name, module in model.named_modules() if isinstance(module, Experts)}
    if not experts:
        raise UserError("parallel.ep: this model has no experts. Set parallel.ep=1.")
    for name, module in experts.items():
        module.dispatcher = TokenDispatcher(mesh_dim, module.up_proj.experts)
        for leaf, layer in module.named_children():
            shard_expert_layer(model, f"{name}.{leaf}", layer, mesh_dim)


def shard_expert_layer(model: Decoder, name: str, layer: nn.Module, mesh_dim: MeshDim) -> None:
    """Keep the local experts of one grouped linear layer."""
    assert isinstance(layer, GroupedLinear)
    if layer.experts % mesh_dim.size:
        reason = f"{layer.experts} experts of {name} cannot be split over {mesh_dim.size} devices"
        raise UserError(f"parallel.ep: {reason}. Use a value that divides {layer.experts}.")
    check_splittable(layer, f"parallel.ep: {name}")
    sizes = mesh_dim.split_sizes(layer.experts)
    layer.experts = sizes[mesh_dim.index]
    shard_parameters(model, name, EXPERT_DIMS, sizes, mesh_dim, "expert")


@dataclass(frozen=True, eq=False)
class TokenDispatcher:
    """Sends rows to the ranks of their experts, and the outputs back.

    A rank sums gradients over the tokens of all expert parallel ranks, and FSDP then averages over fewer ranks than
    have contributed tokens. Gradients are therefore divided by the number of ranks inside the experts, and multiplied
    by it outside.
    """

    mesh_dim: MeshDim
    num_experts: int  # on all ranks

    def __call__(self, expert_fn: Callable[[Tensor, Tensor], Tensor], x: Tensor, sizes: Tensor) -> Tensor:
        """Outputs of `expert_fn` for rows (N, dim) sorted by expert, with `sizes` (E,) rows per expert."""
        mesh_dim, num_local = self.mesh_dim, self.num_experts // self.mesh_dim.size
        counts = torch.empty_like(sizes)
        mesh_dim.all_to_all(counts, sizes)
        all_counts = torch.stack([sizes, counts]).view(2, mesh_dim.size, num_local)
        send_counts, recv_counts = rows_per_rank(all_counts, len(x))  # synchronizes with the device
        rows = all_to_all(x, send_counts, recv_counts, mesh_dim, mesh_dim.size)
        # Received rows are sorted by rank, then expert: sort by expert. Without any rows, one row of zeros is computed,
        # so that all gradients exist.
        expert = torch.arange(num_local, device=x.device).repeat(mesh_dim.size)
        expert = expert.repeat_interleave(counts, output_size=len(rows))
        order = expert.argsort(stable=True)
        local_sizes = counts.view(mesh_dim.size, num_local).sum(0)
        if not len(rows):
            y = expert_fn(F.pad(rows, (0, 0, 0, 1)), F.pad(local_sizes[:-1], (0, 1), value=1))[:0]
        else:
            inverse = invert(order)
            y = permute_rows(expert_fn(permute_rows(rows, order, inverse), local_sizes), inverse, order)
        return all_to_all(y, recv_counts, send_counts, mesh_dim, 1 / mesh_dim.size)


def rows_per_rank(counts: Tensor, total: int) -> list[list[int]]:
    """Rows to send to and receive from each rank, from counts (2, ranks, experts)."""
    return [even_split(total, counts.shape[1])] * 2 if fake_mode.is_fake() else counts.sum(-1).tolist()
