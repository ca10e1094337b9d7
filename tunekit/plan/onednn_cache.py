"""What a CPU keeps of products in bf16: a kernel for each number of rows, and experts get another number in each step.

How large one is depends on the CPU: 0.6 MB where it multiplies in bf16, 0.04 with AVX-512 alone, nothing with less. So
some are made, and weighed.
"""

import ctypes
import platform
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F

CACHE_CAPACITY = 1024  # kernels of oneDNN, and as many of what torch keeps for them
KERNELS_PER_SIZE = 3  # for a number of rows: forward, for the gradient of the rows, and for that of the weight
SHAPE = 384, 576  # of a weight; kernels for larger ones are as large
WARMUP_ROWS, MEASURED_ROWS = range(41, 45), range(45, 65)  # rows: few, so that what else is taken weighs little
STATUS = Path("/proc/self/status")


@cache
def onednn_kernel_bytes() -> int:
    """Bytes of one kernel on this CPU."""
    create_kernels(WARMUP_ROWS)  # with what comes once
    before = trimmed_process_bytes()
    create_kernels(MEASURED_ROWS)
    return max(0, trimmed_process_bytes() - before) // (KERNELS_PER_SIZE * len(MEASURED_ROWS))


def create_kernels(rows: Iterable[int]) -> None:
    """Products of so many rows, forward and back."""
    weight = torch.zeros(SHAPE, dtype=torch.bfloat16, requires_grad=True)
    with torch.enable_grad():
        for count in rows:
            x = torch.zeros(count, SHAPE[1], dtype=torch.bfloat16, requires_grad=True)
            torch.autograd.grad(F.linear(x, weight).sum(), (x, weight))


def trimmed_process_bytes() -> int:
    """The same as `own`, once freed memory has gone back to the system."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
    return process_bytes()


def process_bytes() -> int:
    """Bytes of memory that belong to this process alone; 0 where the system does not tell."""
    lines = STATUS.read_text().splitlines() if STATUS.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)
