"""What a run ran on: device, memory, versions."""

import os
import platform
from importlib import metadata
from pathlib import Path

import torch

from tunekit import devices

PACKAGES = ("tunekit", "torch", "tokenizers", "safetensors", "huggingface_hub", "numpy")
CPU_INFO, MEMORY_INFO = Path("/proc/cpuinfo"), Path("/proc/meminfo")


def hardware(device: torch.device) -> str:
    """The device in words, as `NVIDIA H200 (139 GiB)` or `AMD EPYC 9B45 (2 cores, 23 GiB)`."""
    if devices.capabilities(device).memory_stats:
        found = torch.get_device_module(device).get_device_properties(device)
        return f"{found.name} ({found.total_memory / 2**30:.0f} GiB)"
    cores = f"{len(os.sched_getaffinity(0))} cores"
    return f"{processor()} ({', '.join([cores, *memory()])})"


def processor() -> str:
    """What the processor calls itself."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def memory() -> list[str]:
    """The size of the machine's memory, where it is told."""
    lines = MEMORY_INFO.read_text().splitlines() if MEMORY_INFO.is_file() else []
    return [f"{int(line.split()[1]) / 2**20:.0f} GiB" for line in lines if line.startswith("MemTotal:")]


def available_memory() -> int:
    """Bytes of host memory that a process can still allocate; 0 if the system does not report it."""
    lines = MEMORY_INFO.read_text().splitlines() if MEMORY_INFO.is_file() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), 0)


def versions() -> dict[str, str]:
    """What makes the numbers, and in which version."""
    cuda = {} if torch.version.cuda is None else {"CUDA": torch.version.cuda}
    return {"Python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}, **cuda}
