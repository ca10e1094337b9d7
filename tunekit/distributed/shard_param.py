"""Parameters of which a rank keeps a part."""

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
    team: MeshDim,
    kind: Literal["tensor", "expert"],
) -> None:
    """Of each tensor of a module that `dims` names, leave this rank's part of that dimension.

    `sizes` are those of the largest of them: of what is packed, there is less for the same.
    """
    owner, every = model.get_submodule(module), sum(sizes)
    tensors = {**dict(owner.named_parameters()), **dict(owner.named_buffers())}
    for leaf, dim in ((leaf, dim) for leaf, dim in dims.items() if leaf in tensors):
        whole = tensors[leaf]
        parts = tuple(size * whole.shape[dim] // every for size in sizes)
        shape = [*whole.shape[:dim], parts[team.index], *whole.shape[dim + 1 :]]
        here = torch.empty(shape, dtype=whole.dtype, device=whole.device)
        holder, _, name = leaf.rpartition(".")
        if isinstance(whole, nn.Parameter):
            here = nn.Parameter(here, requires_grad=whole.requires_grad)
        setattr(owner.get_submodule(holder), name, here)
        split = Shard(kind, dim, parts, team.index, team.group)
        model.splits[f"{module}.{leaf}"] = (*model.splits.get(f"{module}.{leaf}", ()), split)
