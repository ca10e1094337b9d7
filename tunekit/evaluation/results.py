"""What is found of a model on a task: figures, each with the values of the rows that it is a mean of."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Metric:
    """One number. Where it is a mean over rows, `values` are sums of each row and `weights` what they are divided by.

    `higher`: whether more is better; None: nobody has said. `rows` names each row: figures are compared row by row
    where they come of the same ones.
    """

    name: str
    value: float
    higher: bool | None = None
    values: Sequence[float] = ()
    weights: Sequence[float] = ()
    rows: Sequence[str] = ()

    @staticmethod
    def mean(
        name: str,
        values: Sequence[float],
        weights: Sequence[float] = (),
        higher: bool | None = True,
        rows: Sequence[str] = (),
    ) -> "Metric":
        """The mean over rows that weigh `weights`: where none are given, all alike. Of no row it is NaN."""
        weights = weights or [1.0] * len(values)
        total = math.fsum(weights)
        value = math.fsum(values) / total if total else math.nan
        return Metric(name, value, higher, tuple(values), tuple(weights), tuple(rows))

    @property
    def counted(self) -> bool:
        """Whether each row is right or wrong."""
        return bool(self.values) and set(self.values) <= {0.0, 1.0} and set(self.weights) == {1.0}

    @property
    def right(self) -> int:
        """Rows that are right."""
        return int(sum(self.values))

    def written(self) -> dict[str, Any]:
        """For a file: weights only where rows differ in them. JSON knows no number that is not finite."""
        value, *values = (one if math.isfinite(one) else None for one in (self.value, *self.values))
        whole = {"value": value, "values": values, "weights": list(self.weights)}
        return {name: part for name, part in whole.items() if name != "weights" or set(self.weights) - {1.0}}


@dataclass(frozen=True)
class TaskResult:
    """What one model made of one task."""

    task: str
    figures: tuple[Metric, ...]
    answers: tuple[str, ...] = ()  # in the order of the questions

    def __getitem__(self, name: str) -> Metric:
        return next(figure for figure in self.figures if figure.name == name)


@dataclass(frozen=True)
class ModelResult:
    """All that was found of one model. Without a task's name, it is told of the first."""

    model: str
    tasks: tuple[TaskResult, ...]

    @property
    def loss(self) -> float:
        """Nats per learnt token; NaN if nothing was learnt of any row."""
        return next((figure.value for figure in self.tasks[0].figures if figure.name == "loss"), math.nan)

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)

    @property
    def answers(self) -> tuple[str, ...]:
        return self.tasks[0].answers

    @property
    def right(self) -> int:
        """Answers that are right to the letter."""
        return self.tasks[0]["exact match"].right if self.answers else 0

    def written(self) -> dict[str, Any]:
        """For a file."""
        parts = {
            found.task: {figure.name: figure.written() for figure in found.figures} | {"answers": list(found.answers)}
            for found in self.tasks
        }
        return {"model": self.model, "tasks": parts}

    @property
    def figures(self) -> dict[tuple[str, str], Metric]:
        """All of them, by the names of their task and their own."""
        return {(found.task, figure.name): figure for found in self.tasks for figure in found.figures}


def perplexity(loss: float) -> float:
    """Of a loss in nats per token."""
    return float(np.exp(min(loss, 700.0)))  # beyond that, a float is infinite
