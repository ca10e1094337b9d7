"""Hardware, memory, and package versions of this machine."""

import os
import platform
import resource
from importlib import metadata
from pathlib import Path

import torch

from tunekit import devices, system

PACKAGES = ("tunekit", "torch", "tokenizers", "safetensors", "huggingface_hub", "numpy")
MEMORY_INFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # of a container, which may have less memory than the machine


def describe_hardware(device: torch.device) -> str:
    """Name and size of a device: `NVIDIA H200 (139 GiB)` or `AMD EPYC 9B45 (2 cores, 23 GiB)`."""
    if devices.device_capabilities(device).memory_stats:
        properties = torch.get_device_module(device).get_device_properties(device)
        return f"{properties.name} ({properties.total_memory / 2**30:.0f} GiB)"
    cores = f"{len(os.sched_getaffinity(0))} cores"
    return f"{processor_name()} ({', '.join([cores, *memory_lines()])})"


def processor_name() -> str:
    """Name of the processor."""
    names = (line.partition(":")[2].strip() for line in system.read_cpu_info() if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def memory_lines() -> list[str]:
    """Size of the host memory; empty if the system does not report it."""
    total = memory_info("MemTotal")
    return [] if total is None else [f"{total / 2**30:.0f} GiB"]


def memory_info(field: str) -> int | None:
    """Bytes in a field of /proc/meminfo; None if the system does not report them."""
    return system.read_memory_field(MEMORY_INFO, field)


def available_memory() -> int | None:
    """Bytes of host memory that this process can still allocate; None if the system does not report them."""
    sizes = [size for size in (memory_info("MemAvailable"), available_in_container()) if size is not None]
    return min(sizes, default=None)


def available_address_space() -> int | None:
    """Bytes of address space that `ulimit -v` leaves to this process; None without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    return max(0, limit - int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize())


def available_in_container() -> int | None:
    """Bytes up to the limit of the control group. The page cache counts as used, and is freed on demand."""
    try:
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        fields = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no limit: "max"
        return None
    return max(0, limit - used + int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0)))


def package_versions() -> dict[str, str]:
    """Versions of the packages that affect results."""
    cuda = {} if torch.version.cuda is None else {"CUDA": torch.version.cuda}
    return {"Python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}, **cuda}
