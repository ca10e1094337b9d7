"""Catastrophic forgetting: the loss on held-out rows of an earlier skill, measured during training."""

import time
from typing import Any

from tunekit.checkpoint.run_dir import STATE
from tunekit.data.dataloader.mixture import dataset_title
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError
from tunekit.loggers.metric_logger import MetricLogger
from tunekit.losses import cross_entropy
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.models.decoder import Decoder
from tunekit.training.data_checks import check_columns
from tunekit.training.run_context import RunContext
from tunekit.training.setup import open_dataloader

HINT = (
    "Start over with --overwrite and a lower optimizer.lr, or with such rows in data. To continue anyway, set "
    "forgetting.on_exceed=warn or raise forgetting.max_loss_increase."
)


class ForgettingMonitor:
    """Loss on the rows of `forgetting.data`, before training and now. Without a config it does nothing."""

    def __init__(self, tokenizer: Tokenizer, run: RunContext) -> None:
        self.config, self.dist, self.run_dir = run.cfg.forgetting, run.dist, run.dir
        self.rows = self.config and open_dataloader(self.config.data, tokenizer, run, "forgetting")
        if self.rows is not None:
            check_columns(run.cfg, "forgetting.data", self.rows, run.dist)
        self.digest = self.rows and self.rows.fingerprint
        self.first_loss: float | None = None  # before the first step
        self.last_loss: float | None = None

    def begin(self, model: Decoder, step: int, logger: MetricLogger) -> None:
        """Measure the loss before training. Raises UserError if a resumed run exceeds the limit already."""
        if self.first_loss is None:
            self.evaluate(model, step, logger)
        self.raise_if_exceeded(step)

    def evaluate(self, model: Decoder, step: int, logger: MetricLogger) -> None:
        """Measure and log the loss on all rows, and warn if it exceeds the limit."""
        if self.config is None or self.rows is None:
            return
        start = time.perf_counter()
        self.last_loss = cross_entropy.eval_loss(CrossEntropy(), model, self.rows, self.dist)
        metrics = {"forgetting/loss": self.last_loss}
        if self.first_loss is None:
            self.first_loss = self.last_loss
        else:
            metrics["forgetting/loss_increase"] = self.last_loss - self.first_loss
        logger.log(step, **metrics, **{"forgetting/eval_time": round(time.perf_counter() - start, 3)})
        if self.is_above_limit and self.config.on_exceed == "warn":
            self.dist.log(f"warning: {self.message(step)}.")

    @property
    def is_above_limit(self) -> bool:
        """Whether the loss has risen by more than the limit, or is not finite."""
        if self.config is None or self.first_loss is None or self.last_loss is None:
            return False
        return not self.last_loss - self.first_loss <= self.config.max_loss_increase

    @property
    def exceeded(self) -> bool:
        """Whether the run must end."""
        return self.config is not None and self.is_above_limit and self.config.on_exceed == "stop"

    def raise_if_exceeded(self, step: int) -> None:
        """Raise UserError if the run must end. The training state has been saved."""
        if self.exceeded:
            raise UserError(f"{self.message(step)}. The training state is saved in {self.run_dir / STATE}. {HINT}")

    def message(self, step: int) -> str:
        assert self.config is not None and self.first_loss is not None and self.last_loss is not None
        return (
            f"forgetting.max_loss_increase: at step {step}, the loss on {dataset_title(self.config.data)} rose from "
            f"{self.first_loss:.4f} to {self.last_loss:.4f} nats per token (limit: "
            f"{self.config.max_loss_increase:g} more)"
        )

    def state_dict(self) -> dict[str, Any]:
        return {"digest": self.digest, "first_loss": self.first_loss, "last_loss": self.last_loss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raise UserError if the rows are not those of the loss in the state."""
        if self.config is not None and state["first_loss"] is not None and state["digest"] != self.digest:
            raise UserError(
                "forgetting.data: the rows have changed since the run started. Restore the original rows, or pass "
                "--overwrite."
            )
        self.digest = self.digest or state["digest"]  # a resumed run without forgetting keeps the baseline
        self.first_loss, self.last_loss = state["first_loss"], state["last_loss"]
