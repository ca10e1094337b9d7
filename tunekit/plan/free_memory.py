"""Free memory of the GPU against what a run needs, before weights are loaded.

Other processes on the same GPU are the most frequent reason for running out of memory, and the error would come minutes
later.
"""

import os
from functools import partial
from typing import Any, NamedTuple

import torch

from tunekit import devices
from tunekit.config.build import DEVICE_VARIABLES
from tunekit.distributed.context import DistributedContext
from tunekit.env_info import available_memory
from tunekit.errors import UserError
from tunekit.plan.estimate import Estimate, estimate
from tunekit.plan.hardware import GIB, current_cluster
from tunekit.plan.memory import CUDA_CONTEXT_BYTES
from tunekit.plan.workload import make_workload


class FreeMemory(NamedTuple):
    """Memory of one GPU, over all processes that use it."""

    label: str
    free: int
    total: int
    allocated: int = 0  # by this process already, which may have trained before, as in a notebook
    variable: str = DEVICE_VARIABLES["cuda"]  # that selects the GPU

    @property
    def used_by_others(self) -> int:
        """Bytes of other processes. This one has loaded the driver, too."""
        return max(0, self.total - self.free - self.allocated - CUDA_CONTEXT_BYTES)


class RequiredMemory(NamedTuple):
    """Memory of a run in addition to the driver: at most, and that of the weights, which is known exactly."""

    peak: int
    weights: int


def required_memory(plan: Estimate) -> RequiredMemory:
    """The memory of one rank."""
    return RequiredMemory(plan.peak.total - CUDA_CONTEXT_BYTES, plan.memory.phases["load"].components["weights"])


def compare_memory(gpu: FreeMemory, required: RequiredMemory | None) -> str:
    """The line to log. Raise UserError if not even the weights fit into what is free."""
    line = f"{gpu.label}: {gpu.free / GIB:.1f} of {gpu.total / GIB:.1f} GiB free"
    if required is None:
        return line
    if required.weights > gpu.free:
        raise UserError(
            f"{line}; the weights alone need {required.weights / GIB:.1f} GiB. {suggest_fix(gpu, required)}"
        )
    line += f"; this config needs about {required.peak / GIB:.1f} GiB"
    return line if required.peak <= gpu.free else f"warning: {line}. {suggest_fix(gpu, required)}"


def suggest_fix(gpu: FreeMemory, required: RequiredMemory) -> str:
    """The advice, which depends on whose memory would be enough if it were free."""
    if required.peak > gpu.free + gpu.used_by_others + gpu.allocated:
        return "`tune plan --auto` finds settings that need less."
    if gpu.allocated > gpu.used_by_others:
        return f"This process already uses {gpu.allocated / GIB:.1f} GiB: restart it, or delete its models."
    others = f"Other processes use {gpu.used_by_others / GIB:.1f} GiB"
    return f"{others}: stop them, or select another GPU with {gpu.variable}."


def check(cfg: Any, dist: DistributedContext) -> None:
    """Log the free memory of the fullest GPU of a run, and what the config needs. Does nothing on a CPU."""
    gpu = read_free_memory(dist)
    if gpu is not None:
        fullest = min(dist.all_gather_objects(gpu), key=lambda gpu: gpu.free)
        dist.log(dist.run_on_main(partial(compare_plan, cfg, dist, fullest)))


def read_free_memory(dist: DistributedContext) -> FreeMemory | None:
    """The memory of this rank's GPU; None where the system does not report it."""
    devices.empty_cache(dist.device)  # memory that torch has cached is free for the run
    info = devices.memory_info(dist.device)
    if info is None:
        return None
    free, total = info
    if devices.shares_host_memory(dist.device):
        free = count_reclaimable(free, total, available_memory())
    allocated = (devices.memory_stats(dist.device) or {}).get("reserved_bytes.all.current", 0)
    variable = DEVICE_VARIABLES[dist.device.type]
    return FreeMemory(name_gpu(dist.device, dist, variable), free, total, allocated, variable)


def count_reclaimable(free: int, total: int, available: int | None) -> int:
    """Free bytes of a GPU that uses the host's memory, of which `available` can be allocated.

    CUDA counts the page cache as used there, so a checkpoint that was just downloaded would seem not to fit
    (unslothai/unsloth#10704 has measurements of a GB10).
    """
    return free if available is None else max(free, min(available, total))


def name_gpu(device: torch.device, dist: DistributedContext, variable: str) -> str:
    """The index of a GPU among those that this process sees, and how they were selected."""
    name = f"GPU {device.index}" if dist.world_size == 1 else f"GPU {device.index} of rank {dist.rank}"
    return f"{name} ({variable}={os.environ[variable]})" if os.environ.get(variable) else name


def compare_plan(cfg: Any, dist: DistributedContext, gpu: FreeMemory) -> str:
    """`compare_memory` with the plan of a config, as far as it can be planned."""
    try:
        cluster = current_cluster(dist.device, dist.world_size, dist.num_nodes)
        required = required_memory(estimate(make_workload(cfg, cluster), cluster))
    except (UserError, RuntimeError, LookupError, TypeError, ValueError):  # the line is for information only
        required = None
    return compare_memory(gpu, required)
