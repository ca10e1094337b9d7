"""Works that are compared run in turns, so that what else the machine does falls on all of them alike."""

import time
from collections.abc import Callable, Mapping

Work = Callable[[], object]
Clock = Callable[[], float]


def turns(works: Mapping[str, Work], rounds: int, clock: Clock = time.perf_counter) -> dict[str, list[float]]:
    """Seconds of each work, by round."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for i in range(rounds + 1):
        for name, work in works.items():
            began = clock()
            work()
            if i:  # the first round warms up
                seconds[name].append(clock() - began)
    return seconds
