"""Functions for ranks of tests: the timeouts of their process groups. Imports as little as it can."""

import warnings
from datetime import timedelta

import torch
import torch.distributed

from tunekit.distributed.context import DistributedContext
from tunekit.distributed.parallel_dims import ParallelConfig


def timeouts(parallel: ParallelConfig) -> tuple[set[timedelta], set[timedelta], list[str]]:
    """Timeouts of the groups for collectives and of the one for long waits, and warnings on the way."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist = DistributedContext(0, "cpu", parallel)
        dist.__enter__()
    meshes = [mesh for mesh in (dist.mesh, dist.grad_mesh, dist.cp_mesh, dist.ep_mesh) if mesh is not None]
    groups = [group for mesh in meshes for group in mesh.get_all_groups()]
    result = timeouts_of(torch.distributed.group.WORLD, *groups), timeouts_of(dist.host_group)
    dist.__exit__(None)
    return *result, [str(warning.message) for warning in caught]


def timeouts_of(*groups: torch.distributed.ProcessGroup | None) -> set[timedelta]:
    return {group._get_backend(torch.device("cpu")).options._timeout for group in groups if group is not None}
