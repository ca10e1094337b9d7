"""Free memory of the GPU against what a run needs, before weights are loaded.

Other processes on the same GPU are the most frequent reason for running out of memory, and the error would come minutes
later.
"""

from functools import partial
from typing import Any, NamedTuple

from tunekit import devices
from tunekit.errors import UserError
from tunekit.parallel.run import Run
from tunekit.plan import explain, outcome
from tunekit.plan.machine import GIB
from tunekit.plan.outcome import Plan
from tunekit.plan.room import DRIVER
from tunekit.plan.task import task

SELECT = "select another GPU with CUDA_VISIBLE_DEVICES"


class Free(NamedTuple):
    """Memory of one GPU, over all processes that use it."""

    label: str
    free: int
    total: int

    @property
    def used_by_others(self) -> int:
        """Bytes of other processes; this one has loaded the driver and nothing else."""
        return max(0, self.total - self.free - DRIVER)


class Need(NamedTuple):
    """Memory of a run in addition to the driver: at most, and that of the weights, which is known exactly."""

    peak: int
    weights: int


def needed(plan: Plan) -> Need:
    """The memory of one rank."""
    return Need(plan.peak.total - DRIVER, plan.room.phases["load"].parts["weights"])


def compare(gpu: Free, need: Need | None) -> str:
    """The line to log. Raise UserError if not even the weights fit into what is free."""
    line = f"{gpu.label}: {gpu.free / GIB:.1f} of {gpu.total / GIB:.1f} GiB free"
    if need is None:
        return line
    if need.weights > gpu.free:
        raise UserError(f"{line}; the weights alone need {need.weights / GIB:.1f} GiB. {remedy(gpu, need)}")
    line += f"; this config needs about {need.peak / GIB:.1f} GiB"
    return line if need.peak <= gpu.free else f"warning: {line}. {remedy(gpu, need)}"


def remedy(gpu: Free, need: Need) -> str:
    """The advice, which depends on whether the memory would be enough without the other processes."""
    if need.peak <= gpu.free + gpu.used_by_others:
        others = f"Other processes use {gpu.used_by_others / GIB:.1f} GiB"
        return f"{others}: stop them (nvidia-smi lists them), or {SELECT}."
    return "`tune plan --fit` finds settings that need less."


def check(cfg: Any, run: Run) -> None:
    """Log the free memory of the fullest GPU of a run, and what the config needs. Does nothing on a CPU."""
    info = devices.memory_info(run.device)
    if info is None:
        return
    name = f"GPU {run.device.index}" if run.size == 1 else f"GPU {run.device.index} of rank {run.rank}"
    fullest = min(run.gather(Free(name, *info)), key=lambda gpu: gpu.free)
    run.tell(run.shared(partial(planned, cfg, run, fullest)))


def planned(cfg: Any, run: Run, gpu: Free) -> str:
    """`compare` with the plan of a config, as far as it can be planned."""
    try:
        machine = explain.found(run.device, run.size, run.hosts)
        need = needed(outcome.plan(task(cfg, machine), machine))
    except (UserError, RuntimeError, LookupError, TypeError, ValueError):  # the line is for information only
        need = None
    return compare(gpu, need)
