"""Check whether Triton kernels can run, by launching one once.

Triton builds a small C extension when a kernel is first launched. It needs a C compiler, `Python.h` and a writable
directory. Slim container images lack the first two, some clusters the last. Torch operations replace the kernels there,
with a warning.
"""

import importlib
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from tunekit.devices import device_capabilities
from tunekit.kernels import cache_dir


def uses_triton(x: Tensor) -> bool:
    """Whether Triton supports the device of a tensor, and works."""
    return device_capabilities(x.device).triton and can_launch()


@cache
def can_launch() -> bool:
    """Whether a trivial kernel compiles and launches on the current GPU. If not, print one warning."""
    buffer = torch.empty(1, device="cuda")  # not in the probe: lack of GPU memory is not a failure of Triton
    failure = find_failure(lambda: launch_probe(buffer))
    if failure:
        print(
            f"warning: Triton kernels cannot be built ({failure}): PyTorch operations are used, which are slower and "
            "need more memory. Install a C compiler and the headers of Python, for example with "
            "`apt-get install gcc python3-dev`.",
            file=sys.stderr,
        )
    return not failure


def launch_probe(buffer: Tensor) -> None:
    cache_dir.set_compiler_cache_directories()
    triton_kernels("probe").launch(buffer)


@cache
def triton_kernels(operation: str) -> ModuleType:
    """Triton kernels of an operation. Their module can only be imported if Triton is installed."""
    return importlib.import_module(f"tunekit.kernels.{operation}_triton")


def find_failure(launch: Callable[[], None]) -> str:
    """Reason why a launch fails, in one line; empty if it works.

    Triton reports a missing compiler as RuntimeError, one that fails as CalledProcessError, a missing libcuda.so as
    AssertionError, and directories that cannot be written as OSError.
    """
    try:
        launch()
    except (ImportError, OSError, RuntimeError, AssertionError, subprocess.SubprocessError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return lines[0]
    return ""
