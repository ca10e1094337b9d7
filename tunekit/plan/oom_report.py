"""Report for out-of-memory errors: the plan of the config, and options that use less memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tunekit.env_info import available_memory
from tunekit.errors import UserError
from tunekit.plan.estimate import estimate
from tunekit.plan.hardware import current_cluster
from tunekit.plan.memory_options import plan_options
from tunekit.plan.report import describe_peak, format_gib, format_options, format_shortage
from tunekit.plan.workload import make_workload

MAX_OPTIONS = 3  # in the report
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


def format_oom_report(cfg: Any, device: torch.device, num_devices: int = 1, num_nodes: int = 1) -> str:
    """Format the peak memory per device, its largest component, and the options that save most."""
    try:
        cluster = current_cluster(device, num_devices, num_nodes)
        plan = estimate(make_workload(cfg, cluster), cluster)
        options = plan_options(plan)[:MAX_OPTIONS]
    except UserError as error:
        return f"out of memory; no plan is available ({error})"
    lines = [f"out of memory: planned peak: {describe_peak(plan)}"]
    if cluster.memory is not None:
        size, shortage = f"{format_gib(cluster.memory)} GiB", f"; {format_shortage(plan)}" if not plan.fits else ""
        lines.append(f"memory of the device: {size}{shortage}")
    lines += (
        ["options that use less memory:", *format_options(plan, options)] if options else ["no option uses less memory"]
    )
    return "\n".join(
        [*lines, "`tune plan` shows details, and --auto finds a config that fits; --debug shows the stack trace"]
    )


def explain_host() -> str:
    """Format the message for exhausted host memory."""
    free = available_memory()
    left = "" if free is None else f" ({format_gib(free)} GiB available)"
    return (
        f"host memory, or GPU memory outside of torch: out of memory{left}. "
        "Set async_save=false, memory.activation_offloading=false or parallel.cpu_offload=false."
    )


@contextmanager
def report_oom(cfg: Any, device: torch.device, num_devices: int = 1, num_nodes: int = 1) -> Iterator[None]:
    """Convert out-of-memory errors into UserError with a report. UserError is not retried."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if host_is_full(error) and device.type != "cpu":
            raise UserError(explain_host()) from error
        if is_oom(error):
            raise UserError(format_oom_report(cfg, device, num_devices, num_nodes)) from error
        raise
