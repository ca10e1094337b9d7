"""Report for out-of-memory errors: the plan of the config, and changes that need less memory."""

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

MAX_SUGGESTIONS = 3  # in the report
CPU_FULL = "can't allocate memory"  # of torch's DefaultCPUAllocator, which has no class of its own
PINNED_FULL = "CUDA error: out of memory"  # of the driver, for memory outside of the allocator of torch


def is_oom(error: BaseException) -> bool:
    """Whether an error is an out-of-memory error."""
    return isinstance(error, torch.OutOfMemoryError) or host_is_full(error)


def host_is_full(error: BaseException) -> bool:
    """Whether host memory ran out, including pinned memory for a GPU."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, MemoryError) or any(text in str(error) for text in (CPU_FULL, PINNED_FULL))


def format_oom_report(cfg: Any, device: torch.device, devices: int = 1, hosts: int = 1) -> str:
    """Format the peak memory per device, its largest component, and the changes that save most."""
    try:
        machine = current_hardware(device, devices, hosts)
        plan = estimate.estimate(make_workload(cfg, machine), machine)
        changes = suggestions.suggest_changes(plan)[:MAX_SUGGESTIONS]
    except UserError as error:
        return f"out of memory; no plan is available ({error})"
    peak, part = plan.peak, report.largest_component(plan.memory)
    available = "" if machine.memory is None else f", of {report.format_gib(machine.memory)} that there are"
    phase = report.PHASE_LABELS[plan.memory.phase]
    lines = [
        f"out of memory: a step needs about {report.format_gib(peak.total)} GiB{available}; "
        f"{report.COMPONENT_LABELS[part]} {report.format_gib(peak.parts[part])} GiB of it, in the {phase}",
        *(["to need less:", *report.format_suggestions(plan, changes)] if changes else ["no known change needs less"]),
        "`tune plan` shows details, and --auto finds a config that fits; --debug shows the stack trace",
    ]
    return "\n".join(lines)


def explain_host() -> str:
    """Format the message for exhausted host memory."""
    free = available_memory()
    left = "" if free is None else f" ({report.format_gib(free)} GiB available)"
    return (
        f"host memory, or GPU memory outside of torch: out of memory{left}. "
        "Set async_save=false, memory.activation_offloading=false or parallel.cpu_offload=false."
    )


def current_hardware(device: torch.device, devices: int, hosts: int) -> ClusterSpec:
    """Describe the machine of this process."""
    info = memory_info(device)
    if info is None:
        return ClusterSpec(devices, hosts)
    total = info[1]
    kind = replace(hardware.gpu_by_memory(round(total / GIB) * GIB), device=describe(device))
    return ClusterSpec(devices, hosts, kind, total, is_assumed=True)


@contextmanager
def report_oom(cfg: Any, device: torch.device, devices: int = 1, hosts: int = 1) -> Iterator[None]:
    """Convert out-of-memory errors into UserError with a report. UserError is not retried."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if host_is_full(error) and device.type != "cpu":
            raise UserError(explain_host()) from error
        if is_oom(error):
            raise UserError(format_oom_report(cfg, device, devices, hosts)) from error
        raise
