"""The limits of this machine, measured: copy bandwidth and products of bf16.

python benchmarks/limits.py
"""

import json
import statistics
import time
from collections.abc import Callable

import torch

SIDES = (1024, 2048, 4096)
COPIED = 2**28  # bytes: beyond every cache


def seconds(work: Callable[[], object], rounds: int, device: torch.device) -> float:
    """The median of some rounds behind one that warms up."""
    found = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


def copying(device: torch.device, size: int = COPIED) -> float:
    """Bytes read and written a second, into memory that is there."""
    one = torch.ones(size, dtype=torch.uint8, device=device)
    two = torch.ones_like(one)
    return 2 * size / seconds(lambda: two.copy_(one), 9, device)


def multiplying(device: torch.device, sides: tuple[int, ...] = SIDES) -> dict[int, float]:
    """Operations a second of square products of bf16, by their side."""
    found = {}
    for side in sides:
        a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
        found[side] = 2 * side**3 / seconds(lambda a=a, b=b: a @ b, 7, device)
    return found


def measured(device: torch.device) -> dict[str, float]:
    products = multiplying(device)
    side = max(products, key=lambda side: products[side])
    return {"copy": copying(device), "matmul": products[side], "side": side}


if __name__ == "__main__":
    print(json.dumps(measured(torch.device("cpu"))))
