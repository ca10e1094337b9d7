"""Hardware limits of this machine: copy bandwidth and bf16 matmul rate.

python benchmarks/limits.py
"""

import json
import statistics
import time
from collections.abc import Callable

import torch

SIDES = (1024, 2048, 4096)
COPIED = 2**28  # bytes, larger than all caches


def seconds(fn: Callable[[], object], rounds: int, device: torch.device) -> float:
    """Median of some rounds after a warmup."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        fn()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def copy_bandwidth(device: torch.device, size: int = COPIED) -> float:
    """Bytes read and written per second, into existing memory."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    two = torch.ones_like(source)
    return 2 * size / seconds(lambda: two.copy_(source), 9, device)


def matmul_rates(device: torch.device, sides: tuple[int, ...] = SIDES) -> dict[int, float]:
    """FLOPs per second of square bf16 matmuls, by size."""
    rates = {}
    for side in sides:
        a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
        rates[side] = 2 * side**3 / seconds(lambda a=a, b=b: a @ b, 7, device)
    return rates


def measure_all(device: torch.device) -> dict[str, float]:
    products = matmul_rates(device)
    side = max(products, key=lambda side: products[side])
    return {"copy": copy_bandwidth(device), "matmul": products[side], "side": side}


if __name__ == "__main__":
    print(json.dumps(measure_all(torch.device("cpu"))))
