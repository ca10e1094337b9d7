"""Progress of the run and logging for reward functions of the user, with the names of TRL."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from tunekit.errors import UserError
from tunekit.rollouts.user_numbers import to_number

# names that reward functions cannot log: those of each line, and arguments of `MetricLogger.log_step`
RUN_COLUMNS = frozenset(
    ("step", "prompt", "completion", "row", "reward", "advantage", "num_tokens", "finish_reason", "environment")
)
RUN_METRICS = frozenset(
    (
        "self",
        "step",
        "batches",
        "data_time",
        "loss",
        "grad_norm",
        "lr",
        "reward",
        "reward_std",
        "frac_reward_zero_std",
        "generation_time",
    )
)


@dataclass(frozen=True)
class TrainerState:
    """Progress of a run, with the names of `TrainerState` in transformers."""

    global_step: int = 0  # optimizer steps so far
    max_steps: int = 0  # optimizer steps of the run; 0 outside of training
    epoch: float = 0.0  # passes over the prompts so far
    is_world_process_zero: bool = True  # whether this is the first process of all


@dataclass
class RewardContext:
    """The state of the run, and what reward functions log about the answers of this rank."""

    trainer_state: TrainerState = TrainerState()
    metrics: dict[str, list[float]] = field(default_factory=dict)  # values of each name
    columns: dict[str, list[Any]] = field(default_factory=dict)  # one value for each answer

    def log_metric(self, name: str, value: float) -> None:
        """Log a number. Values of one name are averaged over the calls and over all ranks."""
        self.metrics.setdefault(name, []).append(to_number(value, f"log_metric: {name!r}"))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Add a column to `completions.jsonl`, with a value for each answer."""
        self.columns.setdefault(column, []).extend(map(to_plain, values))

    def extend(self, other: "RewardContext") -> None:
        """Add what another reward function logged."""
        for name, values in other.metrics.items():
            self.metrics.setdefault(name, []).extend(values)
        for name, values in other.columns.items():
            self.columns.setdefault(name, []).extend(values)

    def check_columns(self, count: int) -> None:
        """Raise UserError unless each column has a value for each of `count` answers."""
        for name, values in self.columns.items():
            if len(values) != count:
                problem = f"log_extra: column {name!r} has {len(values)} values for {count} answers"
                raise UserError(f"rewards: {problem}. Pass one value for each completion.")

    def check_names(self, where: str, rewards: Sequence[str]) -> None:
        """Raise UserError, which starts with `where`, if a name is one that the run itself writes."""
        for call, names, reserved in (
            ("log_metric", self.metrics, RUN_METRICS),
            ("log_extra", self.columns, RUN_COLUMNS.union(rewards)),
        ):
            for name in names:
                if name in reserved:
                    raise UserError(f"{where}: {call}: the run itself writes {name!r}. Log it under another name.")

    def rows(self, count: int) -> list[dict[str, Any]]:
        """Values of the columns for each of `count` answers."""
        return [{name: values[index] for name, values in self.columns.items()} for index in range(count)]


def to_plain(value: Any) -> Any:
    """A value that JSON can hold; None for NaN and Inf, and the text of other objects."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)


def fill_columns(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows with the columns of all ranks; None where a rank logged no value."""
    names = sorted({name for row in rows for name in row})
    return [{name: row.get(name) for name in names} for row in rows]


def mean_metrics(ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Means of the logged numbers over all calls of all ranks, by name."""
    names = sorted({name for metrics in ranks for name in metrics})
    values = {name: [value for metrics in ranks for value in metrics.get(name, ())] for name in names}
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}
