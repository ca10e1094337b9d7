"""Alternating measurements of several workloads, so that other load on the machine affects all of them equally."""

import time
from collections.abc import Callable, Mapping

Work = Callable[[], object]
Clock = Callable[[], float]


def turns(
    works: Mapping[str, Work], rounds: int, clock: Clock = time.perf_counter, warmup: int = 1
) -> dict[str, list[float]]:
    """Seconds of each workload, by round, after `warmup` further rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for i in range(warmup + rounds):
        for name, work in works.items():
            start = clock()
            work()
            if i >= warmup:
                seconds[name].append(clock() - start)
    return seconds
