"""Detection of steps with a NaN, Inf or spike in the loss or the gradient norm, before they change the weights.

Loss and gradient norm are sums over all ranks, so every rank takes the same decision without communication.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from tunekit.checkpoint.training_state import Checkpointer
from tunekit.data.dataloader.prefetch import Prefetcher
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError, UserError
from tunekit.kernels.device_tensors import HostCopy
from tunekit.loggers import divergence
from tunekit.loggers.metric_logger import MetricLogger

MIN_WINDOW = 8  # steps; the median of fewer is too noisy to define a spike: their maximum is used
MAX_ROWS_SHOWN = 16  # in a message
STOP_HINT = (
    "Saved training states are unchanged. Inspect these rows, lower optimizer.lr, or set step_guard.on_nan=skip or "
    "step_guard.on_spike=skip."
)
LIMIT_HINT = (
    "Saved training states are unchanged. Inspect these rows, lower optimizer.lr, or raise "
    "step_guard.max_interventions."
)
DIVERGENCE_HINT = "Stop the run, and lower optimizer.lr or raise lr_scheduler.warmup_steps."


@dataclass(frozen=True)
class StepGuardConfig:
    """Actions on steps that would damage the weights."""

    kind: ClassVar[str] = "step_guard"
    # Action on NaN or Inf in loss or gradient norm: end the run, skip the step, or ignore it
    on_nan: Literal["stop", "skip", "ignore"] = "stop"
    # A step is a spike above this multiple of the running median, at first of the maximum so far; null: off
    spike_factor: float | None = None
    spike_metric: Literal["grad_norm", "loss"] = "grad_norm"  # Metric that is checked for spikes
    spike_window: int = 50  # Steps in the running median
    # Action on a spike; `rollback`: restore the last training state and skip the data since then
    on_spike: Literal["stop", "skip", "rollback"] = "skip"
    max_interventions: int = 3  # Consecutive skipped steps, or rollbacks per run, before the run stops

    def __post_init__(self) -> None:
        if self.spike_factor is not None and not 1 < self.spike_factor < math.inf:
            raise FieldError("spike_factor", f"must be > 1 and finite, got {self.spike_factor}")
        if self.spike_window < MIN_WINDOW:
            raise FieldError("spike_window", f"must be >= {MIN_WINDOW} steps, got {self.spike_window}")
        if self.max_interventions < 1:
            raise FieldError("max_interventions", f"must be >= 1, got {self.max_interventions}")

    @property
    def can_drop_steps(self) -> bool:
        """Whether a step may be dropped while the run continues: loss and norm are then read before the update."""
        return self.on_nan == "skip" or self.spike_factor is not None

    @property
    def may_roll_back(self) -> bool:
        """Whether a run may restore a training state, which must then exist from step 0 on."""
        return self.spike_factor is not None and self.on_spike == "rollback"

    def check_optimizer(self, optimizer_in_bwd: bool) -> None:
        """Raise FieldError if steps are to be dropped, but weights are updated in the backward pass."""
        if optimizer_in_bwd and self.can_drop_steps:
            key = "on_nan: skip" if self.on_nan == "skip" else "spike_factor"
            raise FieldError(
                "step_guard", f"{key} is not compatible with memory.optimizer_in_bwd. Remove one of the two."
            )


class Anomaly(NamedTuple):
    """A step with a non-finite value or a spike, and the action on it."""

    step: int  # 0-based
    problem: str
    action: str  # stop, skip, rollback
    stop_hint: str = STOP_HINT

    def message(self, rows: Sequence[str], action: str) -> str:
        return f"step {self.step + 1}: {self.problem} (rows: {format_rows(rows) or 'unknown'}). {action}"


class StepGuard:
    """Checks every step, and skips, rolls back or ends the run. A training state contains all that it knows.

    with ...:
        if not guard.accepts(step, loss, grad_norm):
            optimizer.zero_grad()                       # a step without gradients changes no weight
        ...
        if guard.needs_rollback(logger):                # logs skipped steps; raises UserError to stop the run
            step = guard.roll_back(checkpointer, logger)
            continue
        ...
        guard.check_all(logger)                         # before anything is saved or evaluated
    """

    def __init__(self, config: StepGuardConfig, dist: DistributedContext, prefetcher: Prefetcher | None = None) -> None:
        # An action that only ends the run can be late by a step: no weights leave the process before `check_all`, so
        # a GPU is never waited for. Skipping a step needs its values before the update.
        self.config, self.dist, self.prefetcher = config, dist, prefetcher
        self.reads_now = config.can_drop_steps or dist.device.type == "cpu"
        self.anomaly: Anomaly | None = None
        self.last_step = 0
        self.unread: list[tuple[int, HostCopy]] = []
        self.skipped_data = 0  # steps of data that rollbacks have skipped
        self.num_rollbacks = 0
        self.num_consecutive_skips = 0
        self.values: deque[float] = deque(maxlen=config.spike_window)
        self.losses: deque[float] = deque(maxlen=divergence.WINDOW)  # of the last steps
        self.first_loss: float | None = None
        self.diverged = False  # a warning has been logged

    def begin(self, step: int, checkpointer: Checkpointer) -> None:
        """Save the training state of step 0 of a run that may roll back to it."""
        if step == 0 and self.config.may_roll_back:
            checkpointer.save(0)

    def data_step(self, step: int) -> int:
        """The step of the data loader that training step `step` reads. It is larger after a rollback."""
        return step + self.skipped_data

    def accepts(self, step: int, loss: Tensor, grad_norm: Tensor) -> bool:
        """Whether the optimizer may use the gradients of this step. True if the values are checked later."""
        self.last_step = step
        if self.config.on_nan == "ignore" and self.config.spike_factor is None:
            return True
        self.unread.append((step, HostCopy(torch.stack([loss.to(grad_norm), grad_norm]))))
        if self.reads_now:
            self.read()
        return self.anomaly is None

    def needs_rollback(self, logger: MetricLogger) -> bool:
        """Act on the values that are available. Raises UserError if the run must stop.

        The device is read only for steps whose metric line is due.
        """
        if logger.pending or (logger.is_due(self.last_step + 1) and not logger.lag):
            self.read(logger.lag)
            self.warn_of_divergence()
        return self.handle_anomaly(logger)

    def check_all(self, logger: MetricLogger) -> None:
        """Read all values and write pending metric lines. Raises UserError if the run must stop."""
        self.read()
        self.warn_of_divergence()
        rolls_back = self.handle_anomaly(logger)
        assert not rolls_back, "values that can cause a rollback are read before the update"
        logger.flush()

    def read(self, lag: int = 0) -> None:
        """Check the values of all steps except the last `lag`, which the device may not have finished."""
        count = max(0, len(self.unread) - lag)
        unread, self.unread = self.unread[:count], self.unread[count:]
        for step, copy in unread:
            loss, grad_norm = copy.read()
            self.losses.append(loss)
            self.first_loss = loss if self.first_loss is None else self.first_loss
            self.anomaly = self.anomaly or self.find_anomaly(step, loss, grad_norm)

    def warn_of_divergence(self) -> None:
        """Log once that the losses of the last steps are far above the first one."""
        if self.first_loss is None or self.diverged or len(self.losses) < divergence.WINDOW:
            return
        if problem := divergence.describe_divergence(self.first_loss, list(self.losses)):
            self.diverged = True
            self.dist.log(f"warning: step {self.last_step + 1}: {problem}. {DIVERGENCE_HINT}")

    def find_anomaly(self, step: int, loss: float, grad_norm: float) -> Anomaly | None:
        config = self.config
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            problem = f"loss is {loss}" if not math.isfinite(loss) else f"grad_norm is {grad_norm}"
            return None if config.on_nan == "ignore" else self.limit_action(step, problem, config.on_nan)
        value = loss if config.spike_metric == "loss" else grad_norm
        if config.spike_factor is not None and self.values:
            name, typical = ("median", median) if len(self.values) >= MIN_WINDOW else ("maximum", max)
            if value > config.spike_factor * typical(self.values):
                ratio = f"{value / typical(self.values):.3g} times the {name} of the last {len(self.values)} steps"
                return self.limit_action(step, f"{config.spike_metric} is {value:.4g}, {ratio}", config.on_spike)
        self.values.append(value)
        self.num_consecutive_skips = 0
        return None

    def limit_action(self, step: int, problem: str, action: str) -> Anomaly:
        """An anomaly with its action, or with `stop` after too many of them."""
        self.num_consecutive_skips += action == "skip"
        count = {"skip": self.num_consecutive_skips, "rollback": self.num_rollbacks + 1}.get(action, 0)
        if count > self.config.max_interventions:
            noun = {"skip": "consecutive skipped steps", "rollback": "rollbacks"}[action]
            problem = f"{problem}, after {self.config.max_interventions} {noun}"
            return Anomaly(step, problem, "stop", LIMIT_HINT)
        return Anomaly(step, problem, action)

    def handle_anomaly(self, logger: MetricLogger) -> bool:
        """Log a skipped step; raise UserError to stop; True: roll back."""
        if self.anomaly is None:
            return False
        anomaly, prefetcher = self.anomaly, self.prefetcher
        assert prefetcher is not None
        prefetcher.pause()
        if anomaly.action == "stop":
            logger.discard_after(step=anomaly.step)
            raise UserError(anomaly.message(self.row_locations(), anomaly.stop_hint))
        if anomaly.action == "rollback":
            return True
        self.dist.log(anomaly.message(self.row_locations(), "The step is skipped."))
        self.anomaly = None
        prefetcher.resume()
        return False

    def row_locations(self) -> list[str]:
        """Files and lines of the rows of the anomaly's step."""
        assert self.anomaly is not None and self.prefetcher is not None
        return self.prefetcher.data.row_locations(self.data_step(self.anomaly.step))

    def roll_back(self, checkpointer: Checkpointer, logger: MetricLogger) -> int:
        """Restore the last training state, skip the data up to the anomaly, and return the step to continue from."""
        anomaly, prefetcher, rows = self.anomaly, self.prefetcher, self.row_locations()
        assert anomaly is not None and prefetcher is not None
        next_data_step, num_rollbacks = self.data_step(anomaly.step) + 1, self.num_rollbacks + 1
        step = checkpointer.restore()  # also restores this guard
        self.skipped_data, self.num_rollbacks, self.anomaly = next_data_step - step, num_rollbacks, None
        self.dist.log(
            anomaly.message(rows, f"Rolled back to step {step}; these rows and those since then are skipped.")
        )
        prefetcher.start(self.data_step(step), self.data_step(logger.num_steps))
        logger.rewind(step)
        prefetcher.resume()
        return step

    def state_dict(self) -> dict[str, Any]:
        return {
            "skipped_data": self.skipped_data,
            "num_rollbacks": self.num_rollbacks,
            "num_consecutive_skips": self.num_consecutive_skips,
            "values": list(self.values),
            "losses": list(self.losses),
            "first_loss": self.first_loss,
            "diverged": self.diverged,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped_data, self.num_rollbacks = state["skipped_data"], state["num_rollbacks"]
        self.num_consecutive_skips = state["num_consecutive_skips"]
        self.values = deque(state["values"], self.config.spike_window)
        self.losses, self.first_loss = deque(state["losses"], divergence.WINDOW), state["first_loss"]
        self.diverged = state["diverged"]


def format_rows(rows: Sequence[str]) -> str:
    """Row locations grouped by file: `chats.jsonl:3, 17, 40 and 12 more`."""
    split = [(location.rstrip("0123456789"), location) for location in rows[:MAX_ROWS_SHOWN]]
    groups = []
    for prefix, group in groupby(split, key=lambda pair: pair[0]):
        numbers = [location.removeprefix(prefix) for _, location in group]
        groups.append(prefix + ", ".join(filter(None, numbers)))
    more = f" and {len(rows) - MAX_ROWS_SHOWN} more" if len(rows) > MAX_ROWS_SHOWN else ""
    return ", ".join(groups) + more
