"""Results of a model on its tasks: metrics with the values of the rows that they are computed from."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Metric:
    """One number. If it is a mean over rows, `values` are the sums of the rows and `weights` their divisors.

    `higher_is_better` is None if unknown. `rows` identifies each row: two metrics are compared row by row if they have
    the same rows.
    """

    name: str
    value: float
    higher_is_better: bool | None = None
    values: Sequence[float] = ()
    weights: Sequence[float] = ()
    rows: Sequence[str] = ()

    @staticmethod
    def mean(
        name: str,
        values: Sequence[float],
        weights: Sequence[float] = (),
        higher_is_better: bool | None = True,
        rows: Sequence[str] = (),
    ) -> "Metric":
        """Mean over rows with the given weights (default: 1). NaN without rows."""
        weights = weights or [1.0] * len(values)
        total = math.fsum(weights)
        value = math.fsum(values) / total if total else math.nan
        return Metric(name, value, higher_is_better, tuple(values), tuple(weights), tuple(rows))

    @property
    def is_binary(self) -> bool:
        """Whether each row is either correct or incorrect."""
        return bool(self.values) and set(self.values) <= {0.0, 1.0} and set(self.weights) == {1.0}

    @property
    def num_correct(self) -> int:
        """Number of correct rows of a binary metric."""
        return int(sum(self.values))

    def to_dict(self) -> dict[str, Any]:
        """JSON-serializable form. Weights are left out if all are 1; non-finite values become None."""
        value, *values = (number if math.isfinite(number) else None for number in (self.value, *self.values))
        content: dict[str, Any] = {"value": value, "values": values}
        return content | ({"weights": list(self.weights)} if set(self.weights) - {1.0} else {})


@dataclass(frozen=True)
class TaskResult:
    """Metrics and completions of one model on one task."""

    task: str
    metrics: tuple[Metric, ...]
    answers: tuple[str, ...] = ()  # in the order of the questions

    def __getitem__(self, name: str) -> Metric:
        return next(metric for metric in self.metrics if metric.name == name)


@dataclass(frozen=True)
class ModelResult:
    """Results of one model on all tasks. Properties without a task name refer to the first task."""

    model: str
    tasks: tuple[TaskResult, ...]

    @property
    def loss(self) -> float:
        """Loss in nats per target token; NaN if no row has target tokens."""
        return next((metric.value for metric in self.tasks[0].metrics if metric.name == "loss"), math.nan)

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)

    @property
    def answers(self) -> tuple[str, ...]:
        return self.tasks[0].answers

    @property
    def num_correct(self) -> int:
        """Number of answers that match exactly."""
        return self.tasks[0]["exact_match"].num_correct if self.answers else 0

    def to_dict(self) -> dict[str, Any]:
        """JSON-serializable form."""
        tasks = {
            result.task: {metric.name: metric.to_dict() for metric in result.metrics}
            | {"answers": list(result.answers)}
            for result in self.tasks
        }
        return {"model": self.model, "tasks": tasks}

    @property
    def metrics(self) -> dict[tuple[str, str], Metric]:
        """All metrics by task and name."""
        return {(result.task, metric.name): metric for result in self.tasks for metric in result.metrics}


def perplexity(loss: float) -> float:
    """Perplexity of a loss in nats per token."""
    return float(np.exp(min(loss, 700.0)))  # exp overflows a float beyond 709
