"""Intervals between evaluations and training states: steps, a fraction of the run, or epochs."""

import math
from itertools import count
from typing import Literal, NamedTuple

from tunekit.data.dataloader.base import DataLoader
from tunekit.errors import FieldError

Interval = int | float | Literal["epoch"]  # steps; a value below 1 is a fraction of all steps


def interval_error(key: str, every: Interval, is_stream: bool) -> FieldError | None:
    """Error of an interval that is out of range, or of epochs of a stream, whose length is unknown."""
    if every == "epoch":
        problem = "the length of an epoch of streamed data is unknown. Set a number of steps."
        return FieldError(key, problem) if is_stream else None
    if 0 < every < 1 or (every < math.inf and every >= 1 and every == int(every)):
        return None
    return FieldError(key, f"must be a number of steps, a fraction of all steps below 1, or epoch, got {every}")


class StepPlan(NamedTuple):
    """Steps of a run, and when something is due."""

    num_steps: int
    data: DataLoader

    def is_due(self, every: Interval, step: int) -> bool:
        """Whether an interval ends after `step` steps."""
        if every == "epoch":
            return step in (0, next(end for end in map(self.data.num_steps, count(1)) if end >= step))
        return step % self.to_steps(every) == 0

    def to_steps(self, every: int | float) -> int:
        """Number of steps of an interval, as in transformers."""
        return math.ceil(every * self.num_steps) if every < 1 else int(every)

    def max_gap(self, every: Interval) -> int:
        """The most steps between two ends of an interval."""
        if every != "epoch":
            return min(self.to_steps(every), self.num_steps)
        ends = [0]
        while ends[-1] < self.num_steps:
            ends.append(self.data.num_steps(len(ends)))
        return max(end - start for start, end in zip(ends, ends[1:], strict=False))
