"""Replaces parameters with local shards."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import nn

from tunekit.distributed.collectives import MeshDim
from tunekit.distributed.sharding import Shard
from tunekit.models.decoder import Decoder


def shard_parameters(
    model: Decoder,
    module: str,
    dims: Mapping[str, int],
    sizes: tuple[int, ...],
    mesh_dim: MeshDim,
    kind: Literal["tensor", "expert"],
) -> None:
    """Keep the local shard of each tensor of a module in `dims` (tensor name to dimension).

    `sizes` are the shard sizes of the unquantized weight; those of quantized tensors are proportional.
    """
    owner, total = model.get_submodule(module), sum(sizes)
    tensors = {**dict(owner.named_parameters()), **dict(owner.named_buffers())}
    for leaf, dim in ((leaf, dim) for leaf, dim in dims.items() if leaf in tensors):
        full = tensors[leaf]
        shard_sizes = tuple(size * full.shape[dim] // total for size in sizes)
        shape = [*full.shape[:dim], shard_sizes[mesh_dim.index], *full.shape[dim + 1 :]]
        local = torch.empty(shape, dtype=full.dtype, device=full.device)
        holder, _, name = leaf.rpartition(".")
        if isinstance(full, nn.Parameter):
            local = nn.Parameter(local, requires_grad=full.requires_grad)
        setattr(owner.get_submodule(holder), name, local)
        shard = Shard(kind, dim, shard_sizes, mesh_dim.index, mesh_dim.group)
        model.shards[f"{module}.{leaf}"] = (*model.shards.get(f"{module}.{leaf}", ()), shard)
