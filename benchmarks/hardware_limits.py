"""Hardware limits of this machine: copy bandwidth and bf16 matmul rate.

python benchmarks/hardware_limits.py
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

MATMUL_SIZES = (1024, 2048, 4096)
COPY_BYTES = 2**28  # larger than all caches
READ_BYTES = 2**29


def measure_seconds(fn: Callable[[], object], rounds: int, device: torch.device) -> list[float]:
    """Seconds of each call after one warmup call."""
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        fn()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def measure_copy_bandwidth(device: torch.device, num_bytes: int = COPY_BYTES) -> float:
    """Bytes read and written per second, into allocated memory."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    return 2 * num_bytes / statistics.median(measure_seconds(lambda: target.copy_(source), 9, device))


def measure_read_bandwidth() -> float:
    """Bytes read per second by a sum on the CPU."""
    tensor = torch.ones(READ_BYTES // 4)
    return READ_BYTES / min(measure_seconds(tensor.sum, 4, tensor.device))


def measure_matmul_rates(device: torch.device, sizes: tuple[int, ...] = MATMUL_SIZES) -> dict[int, float]:
    """FLOP/s of square bf16 matmuls, by size."""
    rates = {}
    for size in sizes:
        a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
        rates[size] = 2 * size**3 / statistics.median(measure_seconds(lambda a=a, b=b: a @ b, 7, device))
    return rates


def measure_limits(device: torch.device) -> dict[str, float]:
    rates = measure_matmul_rates(device)
    size = max(rates, key=lambda size: rates[size])
    return {"copy": measure_copy_bandwidth(device), "matmul": rates[size], "matmul_size": size}


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(json.dumps(measure_limits(torch.device("cpu"))))
