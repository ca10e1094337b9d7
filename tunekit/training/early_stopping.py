"""The best step of a run by a metric of its evaluations: early stopping, and the weights of the result."""

import math
from collections.abc import Mapping
from typing import Any

from tunekit.checkpoint.training_state import Checkpointer
from tunekit.errors import UserError
from tunekit.training.config import TrainConfig


class EarlyStopping:
    """Finds the best step of a run, whose training state is kept. Training states contain its own state.

    if ... or early_stopping.needs_save(step) or ...:
        checkpointer.save(step)                                      # keeps the state of `step_to_keep`
    step = early_stopping.finish(checkpointer, step, num_steps)      # loads the best weights
    """

    def __init__(self, cfg: TrainConfig) -> None:
        self.patience, self.metric = cfg.early_stopping_patience, metric_name(cfg.metric_for_best_model)
        self.loads_best = (
            self.patience is not None if cfg.load_best_model_at_end is None else cfg.load_best_model_at_end
        )
        greater = not self.metric.endswith("loss") if cfg.greater_is_better is None else cfg.greater_is_better
        self.sign = -1 if greater else 1
        self.best: float | None = None
        self.best_step: int | None = None
        self.num_worse = 0

    def check_metric(self, metrics: Mapping[str, float]) -> None:
        """Raise UserError if the metric decides something and the evaluation does not have it."""
        if self.metric not in metrics and (self.loads_best or self.patience is not None):
            names = ", ".join(metrics)
            raise UserError(f"metric_for_best_model: the evaluation has no metric {self.metric!r}. Use one of {names}.")

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of one evaluation into account. NaN and a missing metric are never better."""
        value = metrics.get(self.metric, math.nan)
        if self.sign * value < (math.inf if self.best is None else self.sign * self.best):
            self.best, self.best_step, self.num_worse = value, step, 0
        else:
            self.num_worse += 1

    @property
    def triggered(self) -> bool:
        """Whether `patience` evaluations in a row were not better; never without a patience."""
        return self.patience is not None and self.num_worse >= self.patience

    def needs_save(self, step: int) -> bool:
        """Whether the training state of this step must be saved: the best so far, or the last one."""
        return self.triggered or self.step_to_keep == step

    @property
    def step_to_keep(self) -> int | None:
        """Step whose training state must not be deleted."""
        return self.best_step if self.loads_best else None

    def finish(self, checkpointer: Checkpointer, step: int, num_steps: int) -> int:
        """Load the best weights if they are the result. Returns the step of the weights that the model then has."""
        name, log = f"eval/{self.metric}", checkpointer.dist.log
        if step < num_steps:
            comparison = "lower" if self.sign > 0 else "higher"
            log(f"early stopping after step {step}: no {comparison} {name} in {self.patience} evaluations")
        if self.loads_best and self.best_step is None:
            log(f"warning: no evaluation has a finite {name}. The result has the last weights.")
        if self.step_to_keep in (None, step):
            return step
        checkpointer.load_weights(self.step_to_keep)
        log(f"best {name}: {self.best:.6g} after step {self.best_step}. The result has the weights of this step.")
        return self.step_to_keep

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step, "num_worse": self.num_worse}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.best_step, self.num_worse = state["best"], state["best_step"], state["num_worse"]


def metric_name(name: str) -> str:
    """Name of a metric without the prefix of evaluations, which is eval_ in transformers."""
    return name.removeprefix("eval/").removeprefix("eval_")
