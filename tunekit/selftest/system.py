"""Versions and hardware that a report needs. No name of the user or of the machine, and no path."""

import os
import platform
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch.cuda import nccl

from tunekit import devices, env_info
from tunekit.kernels import cache_dir, cpp_extension
from tunekit.selftest.context import Context
from tunekit.selftest.result import CheckFailedError, CheckSkippedError, Result

PACKAGES = ("tunekit", "torch", "triton", "safetensors", "tokenizers", "huggingface_hub", "datasets", "numpy")
OPTIONAL = ("transformers", "peft", "bitsandbytes", "flash-attn-3", "flash-linear-attention")
# Environment variables that change results or speed and contain no names.
VARIABLES = re.compile(
    r"(CUDA_VISIBLE_DEVICES|CUDA_LAUNCH_BLOCKING|CUBLAS_WORKSPACE_CONFIG|NVIDIA_TF32_OVERRIDE|OMP_NUM_THREADS"
    r"|PYTORCH_(CUDA_)?ALLOC_CONF|TORCH_CUDNN_\w+|TORCHDYNAMO_DISABLE|TRITON_INTERPRET|NCCL_(P2P|SHM|IB)_DISABLE)"
)
DRIVER_FILE = Path("/proc/driver/nvidia/version")
SECONDS = 10  # time limit of nvidia-smi


def check_versions(context: Context) -> Result:
    """Everything that a maintainer asks for first."""
    values: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()} {'-'.join(platform.libc_ver())}",
        "kernel": platform.release(),
        **{name: version for name in (*PACKAGES, *OPTIONAL) if (version := package_version(name))},
        "torch_build": {
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "xpu": torch.version.xpu,
            "git": torch.version.git_version,
        },
        "compiler": compiler_version(),
        "cpu": env_info.processor_name(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory": ", ".join(env_info.memory_lines()),
        "load": round(os.getloadavg()[0], 1),  # other programs slow down the speed checks
        "device": context.device.type,
        "bf16": devices.has_fast_bf16(context.device),
        "gpus": list_gpus(),
        "environment": {key: value for key, value in sorted(os.environ.items()) if VARIABLES.fullmatch(key)},
    }
    if torch.cuda.is_available():
        values |= {"driver": driver_version(), "nccl": nccl_version(), "cudnn": torch.backends.cudnn.version()}
    names = [gpu["name"] for gpu in values["gpus"]] if context.device.type in ("cuda", "xpu") else [values["cpu"]]
    versions = f"tunekit {values.get('tunekit')}, torch {values.get('torch')}, Python {values['python']}"
    return Result(f"{versions}, {' + '.join(sorted(set(names)))}", values)


def package_version(name: str) -> str | None:
    """The version of an installed package. A checkout on PYTHONPATH has none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def compiler_version() -> str | None:
    """The first line that the C++ compiler prints about itself; kernels for the CPU and Triton need one."""
    try:
        command = [os.environ.get("CXX", "c++").split()[0], "--version"]
        text = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return text.partition("\n")[0] or None


def list_gpus() -> list[dict[str, Any]]:
    """Each visible GPU: name, total and free memory, and on CUDA devices the capability."""
    counts = devices.count_devices()
    visible = [torch.device(kind, index) for kind in ("cuda", "xpu") for index in range(counts[kind])]
    return [describe_gpu(device) for device in visible]


def describe_gpu(device: torch.device) -> dict[str, Any]:
    properties = torch.get_device_module(device).get_device_properties(device)
    values = {"name": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)}
    memory = devices.memory_info(device)
    if memory is not None:
        values["free_gib"] = round(memory[0] / 2**30, 1)
    if device.type == "cuda":
        values["capability"] = f"{properties.major}.{properties.minor}"
        values["multiprocessors"] = properties.multi_processor_count
    return values


def driver_version() -> str | None:
    """The version of NVIDIA's kernel driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True).stdout
        return text.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        match = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", DRIVER_FILE.read_text()) if DRIVER_FILE.is_file() else None
        return match[0] if match else None


def nccl_version() -> str | None:
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, nccl.version()))


def check_compile(context: Context) -> Result:
    """Build the C++ kernels, or take them from the cache, so that no later check waits for the compiler."""
    if context.device.type != "cpu":
        raise CheckSkippedError("C++ kernels are for the CPU")
    sources = sorted(Path(cpp_extension.__file__).parent.glob("*.cpp"))
    start = time.perf_counter()
    with ThreadPoolExecutor() as pool:
        errors = [*filter(None, pool.map(build_error, sources))]
    if errors and not cache_dir.is_writable(cache_dir.compile_cache_dir()):
        raise CheckSkippedError(
            f"cannot write to the cache directory {cache_dir.compile_cache_dir()}: torch operations are used, which "
            f"are slower. Set {cache_dir.CACHE_VARIABLE} to another directory."
        )
    if errors and all(isinstance(error, FileNotFoundError) for error in errors):
        raise CheckSkippedError(f"{errors[0]}: torch operations are used, which are slower")
    if errors:
        raise CheckFailedError(str(errors[0]))
    return Result(f"{len(sources)} C++ files built or found in the cache", {"seconds": time.perf_counter() - start})


def build_error(source: Path) -> Exception | None:
    """The error of the compiler for a file."""
    try:
        cpp_extension.build_library(source)
    except FileNotFoundError as error:
        return error
    except (OSError, subprocess.SubprocessError) as error:
        return RuntimeError(f"{source.name}: {error}")
    return None


FUNCTIONS = {"versions": check_versions, "compile": check_compile}
