"""Hardware limits of this machine: copy bandwidth and rate of matrix products. Used by the benchmarks, too."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch

from tunekit import devices
from tunekit.selftest.context import synchronize

MATMUL_SIZES = {"cuda": (4096, 8192), "cpu": (1024, 2048)}
COPY_BYTES = {"cuda": 2**30, "cpu": 2**28}  # beyond every cache


class Limits(NamedTuple):
    """Measured rates of the device."""

    rate: float  # operations a second of the fastest matrix product
    bandwidth: float  # bytes a second of a copy, read and written
    dtype: torch.dtype


def measure_seconds(
    fn: Callable[[], object], rounds: int, device: torch.device, slow: float = float("inf")
) -> list[float]:
    """Seconds of each call after one warmup call. A function that takes more than `slow` seconds is timed once."""
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        fn()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
        if seconds[0] > slow and len(seconds) == 2:
            break
    return seconds[1:]


def measure_copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes read and written per second, into allocated memory."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    return 2 * num_bytes / statistics.median(measure_seconds(partial(target.copy_, source), 9, device))


def measure_matmul_rates(
    device: torch.device, sizes: Sequence[int], dtype: torch.dtype = torch.bfloat16
) -> dict[int, float]:
    """FLOP/s of square matmuls, by size."""
    rates = {}
    for size in sizes:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        rates[size] = 2 * size**3 / statistics.median(measure_seconds(partial(torch.mm, a, b), 7, device))
    return rates


@cache
def measure_limits(device: torch.device) -> Limits:
    """The rate of matrix products in the dtype of training, and the bandwidth of the memory."""
    dtype = torch.bfloat16 if devices.has_fast_bf16(device) else torch.float32
    rates = measure_matmul_rates(device, MATMUL_SIZES.get(device.type, MATMUL_SIZES["cpu"]), dtype)
    bandwidth = measure_copy_bandwidth(device, COPY_BYTES.get(device.type, COPY_BYTES["cpu"]))
    return Limits(max(rates.values()), bandwidth, dtype)
