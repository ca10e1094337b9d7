"""Interleaved timing of several workloads, so that other load on the machine affects all of them equally."""

import time
from collections.abc import Callable, Mapping

Workload = Callable[[], object]
Clock = Callable[[], float]


def measure_interleaved(
    workloads: Mapping[str, Workload], rounds: int, clock: Clock = time.perf_counter, warmup: int = 1
) -> dict[str, list[float]]:
    """Seconds of each workload, by round. `warmup` additional rounds run first and are not measured."""
    seconds: dict[str, list[float]] = {name: [] for name in workloads}
    for i in range(warmup + rounds):
        for name, workload in workloads.items():
            start = clock()
            workload()
            if i >= warmup:
                seconds[name].append(clock() - start)
    return seconds
