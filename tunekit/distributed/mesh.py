"""Device meshes whose process groups have the configured timeout."""

from collections.abc import Sequence
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def build_mesh(
    device: str, sizes: Sequence[int], names: tuple[str, ...], timeout: timedelta, self_group: list[dist.ProcessGroup]
) -> DeviceMesh:
    """Mesh over all ranks, with one process group per dimension. Dimensions of size 1 share `self_group`, which is
    created for the first of them, because NCCL splits a communicator for each group.

    `init_device_mesh` would use torch's default timeout, and split the gloo backend with options of NCCL, which warns.
    """
    ranks = torch.arange(dist.get_world_size()).view(*sizes)
    groups = []
    for dim, name in enumerate(names):
        if sizes[dim] == 1 and dist.get_world_size() > 1:
            self_group[:] = self_group or [group_along(ranks, dim, "own", timeout)]
            groups += self_group
        else:
            groups.append(group_along(ranks, dim, f"mesh_{name}", timeout))
    return DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=names)


def group_along(ranks: torch.Tensor, dim: int, name: str, timeout: timedelta) -> dist.ProcessGroup:
    """Process group of this rank along one mesh dimension. All ranks create all groups in the same order."""
    rows = ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist()
    if len(rows) == 1:  # all ranks: the default group
        return cast("dist.ProcessGroup", dist.group.WORLD)
    groups = [dist.new_group(row, timeout, group_desc=name) for row in rows]
    group = next(group for row, group in zip(rows, groups, strict=True) if dist.get_rank() in row)
    return cast("dist.ProcessGroup", group)
