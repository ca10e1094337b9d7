"""Why a run had too little memory, and what to change: its plan, once torch has found none to give."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from tunekit.devices import describe, memory_info
from tunekit.env_info import available_memory
from tunekit.errors import UserError
from tunekit.plan import estimate, hardware, report, suggestions
from tunekit.plan.hardware import GIB, ClusterSpec
from tunekit.plan.workload import make_workload

MAX_SUGGESTIONS = 3  # changes that are told
CPU_FULL = "can't allocate memory"  # of torch's DefaultCPUAllocator, which has no class of its own
PINNED_FULL = "CUDA error: out of memory"  # of the driver, for memory that torch.OutOfMemoryError is not about


def is_oom(error: BaseException) -> bool:
    """Whether an error says that there is no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or host_is_full(error)


def host_is_full(error: BaseException) -> bool:
    """Whether it is the host whose memory ran out: that of the CPU, or pinned memory for a GPU."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, MemoryError) or any(text in str(error) for text in (CPU_FULL, PINNED_FULL))


def format_oom_report(cfg: Any, device: torch.device, devices: int = 1, hosts: int = 1) -> str:
    """What the config needs on each of `devices`, the largest part of it, and what the best changes would save."""
    try:
        machine = current_hardware(device, devices, hosts)
        plan = estimate.estimate(make_workload(cfg, machine), machine)
        changes = suggestions.suggest_changes(plan)[:MAX_SUGGESTIONS]
    except UserError as error:
        return f"out of memory; what would need less cannot be told ({error})"
    peak, part = plan.peak, report.largest_component(plan.memory)
    available = "" if machine.memory is None else f", of {report.format_gib(machine.memory)} that there are"
    lines = [
        f"out of memory: a step needs about {report.format_gib(peak.total)} GiB{available}; "
        f"{report.COMPONENT_LABELS[part]} {report.format_gib(peak.parts[part])} GiB of it, in the {report.PHASE_LABELS[plan.memory.phase]}",
        *(
            ["to need less:", *report.format_suggestions(plan, changes)]
            if changes
            else ["nothing that is known would need less"]
        ),
        "`tune plan` tells more, and with --auto finds what fits; --debug shows where memory ended",
    ]
    return "\n".join(lines)


def explain_host() -> str:
    """What to do when the memory of the host of GPUs ran out."""
    free = available_memory()
    left = "" if free is None else f" ({report.format_gib(free)} GiB available)"
    return (
        f"host memory, or GPU memory outside of torch: out of memory{left}. "
        "Set async_save=false, memory.activation_offloading=false or parallel.cpu_offload=false."
    )


def current_hardware(device: torch.device, devices: int, hosts: int) -> ClusterSpec:
    """The machine at hand."""
    info = memory_info(device)
    if info is None:
        return ClusterSpec(devices, hosts)
    total = info[1]
    kind = replace(hardware.gpu_by_memory(round(total / GIB) * GIB), device=describe(device))
    return ClusterSpec(devices, hosts, kind, total, is_assumed=True)


@contextmanager
def report_oom(cfg: Any, device: torch.device, devices: int = 1, hosts: int = 1) -> Iterator[None]:
    """Around a run: where memory ends, people are told why. Started again it would end in the same place."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if host_is_full(error) and device.type != "cpu":
            raise UserError(explain_host()) from error
        if is_oom(error):
            raise UserError(format_oom_report(cfg, device, devices, hosts)) from error
        raise
