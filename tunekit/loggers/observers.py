"""Observers of the metrics of runs in this process, such as callbacks. They receive copies, and nothing returns."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol


class MetricObserver(Protocol):
    """Receives the metric lines of a run on its main process, between two steps."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take a line of `metrics.jsonl`. After a rollback, steps are repeated."""
        ...

    def close(self) -> None: ...


# Opens an observer for the steps of a run: from the first number, of the second one
OpenObserver = Callable[[int, int], MetricObserver]
OBSERVERS: ContextVar[tuple[OpenObserver, ...]] = ContextVar("OBSERVERS", default=())
HIDES_PROGRESS: ContextVar[bool] = ContextVar("HIDES_PROGRESS", default=False)


@contextmanager
def observe_metrics(observers: Sequence[OpenObserver], hides_progress: bool = False) -> Iterator[None]:
    """Let observers receive the metrics of the runs that start inside the block.

    `hides_progress`: one of them shows the progress, instead of lines on the terminal.
    """
    tokens = OBSERVERS.set((*OBSERVERS.get(), *observers)), HIDES_PROGRESS.set(hides_progress)
    try:
        yield
    finally:
        OBSERVERS.reset(tokens[0])
        HIDES_PROGRESS.reset(tokens[1])


def open_observers(start: int, num_steps: int) -> list[MetricObserver]:
    """The observers of a run that starts or resumes at step `start`."""
    return [open_observer(start, num_steps) for open_observer in OBSERVERS.get()]
