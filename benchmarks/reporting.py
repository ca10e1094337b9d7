"""Statistics, table cells and descriptions of the environment that several benchmarks print."""

import math
import os
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import torch

from tunekit.env_info import describe_hardware

BENCHMARKS = Path(__file__).parent
RESULTS = BENCHMARKS / "results"
CPU = torch.device("cpu")


def describe_environment(*packages: str, device: torch.device = CPU) -> str:
    """Hardware, threads, versions of torch, `packages` and Python, and the load average of the last minute."""
    versions = (f"{name} {metadata.version(name)}" for name in ("torch", *packages))
    threads = f"{torch.get_num_threads()} threads"
    parts = describe_hardware(device), threads, *versions, f"Python {platform.python_version()}"
    return f"{', '.join(parts)}; load average {os.getloadavg()[0]:.1f}"


def format_milliseconds(seconds: Sequence[float], decimals: int = 2) -> str:
    """Median in milliseconds, with the minimum in parentheses."""
    median, minimum = statistics.median(seconds) * 1e3, min(seconds) * 1e3
    return f"{median:,.{decimals}f} ({minimum:,.{decimals}f})"


def format_range(values: Iterable[float], decimals: int = 2) -> str:
    """Median, with the minimum and the maximum in parentheses."""
    values = sorted(values)
    return f"{statistics.median(values):.{decimals}f} ({values[0]:.{decimals}f} to {values[-1]:.{decimals}f})"


def print_times(seconds: Mapping[str, Sequence[float]], speedup: bool = False) -> None:
    """Print a row per workload: times, and the ratio to the time of the first workload or the speedup over it."""
    baseline = statistics.median(next(iter(seconds.values())))
    for name, times in seconds.items():
        ratio = statistics.median(times) / baseline
        print(f"| {name} | {format_milliseconds(times)} | {1 / ratio if speedup else ratio:.2f} |", flush=True)


def fit_exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Exponent p of y = a x^p: slope of a least-squares fit of the logarithms."""
    return statistics.linear_regression([*map(math.log, x)], [*map(math.log, y)]).slope
