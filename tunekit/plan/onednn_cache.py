"""Memory of oneDNN's cache of bf16 matmul kernels: one for each number of rows, which changes in each step for experts.

The size of a kernel depends on the CPU: 0.6 MB with bf16 matmuls, 0.04 MB with AVX-512 only, 0 otherwise. It is
measured by creating some kernels.
"""

import ctypes
import platform
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F

from tunekit.system import read_memory_field

CACHE_CAPACITY = 1024  # kernels in the cache of oneDNN, and entries in the cache of torch
KERNELS_PER_SIZE = 3  # kernels per number of rows: forward, input gradient, weight gradient
SHAPE = 384, 576  # of the weight; kernels of larger weights have the same size
WARMUP_ROWS, MEASURED_ROWS = range(41, 45), range(45, 65)  # numbers of rows; small, so that activations are small
STATUS = Path("/proc/self/status")


@cache
def onednn_kernel_bytes() -> int:
    """Measure the bytes of one kernel on this CPU."""
    create_kernels(WARMUP_ROWS)  # includes one-time allocations
    before = trimmed_process_bytes()
    create_kernels(MEASURED_ROWS)
    return max(0, trimmed_process_bytes() - before) // (KERNELS_PER_SIZE * len(MEASURED_ROWS))


def create_kernels(rows: Iterable[int]) -> None:
    """Run a matmul forward and backward for each number of rows."""
    weight = torch.zeros(SHAPE, dtype=torch.bfloat16, requires_grad=True)
    with torch.enable_grad():
        for count in rows:
            x = torch.zeros(count, SHAPE[1], dtype=torch.bfloat16, requires_grad=True)
            torch.autograd.grad(F.linear(x, weight).sum(), (x, weight))


def trimmed_process_bytes() -> int:
    """Private bytes of this process after freed memory was returned to the system; 0 if they are not reported."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
    return read_memory_field(STATUS, "RssAnon") or 0
