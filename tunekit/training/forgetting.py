"""Whether training spoils what the model could do before: the loss on rows of an earlier skill, watched on the way."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tunekit.checkpoint.run_dir import STATE
from tunekit.data.dataloader.build import DataLoader, build_dataloader
from tunekit.data.dataloader.mixture import SFTData, dataset_title, is_streaming
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError, UserError
from tunekit.losses import cross_entropy
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.models.decoder import Decoder
from tunekit.models.spec import DecoderSpec

AGAIN = "start over (--overwrite) with a lower optimizer.lr or with such rows in data"
ON = "the same command with forgetting.on_exceed=warn, or a higher forgetting.max_loss_increase, goes on"


@dataclass(frozen=True)
class ForgettingConfig:
    """Held-out rows of a skill that is to stay. Their loss is measured before the first step and every so often."""

    data: SFTData  # what the model could do before
    eval_every: int = 100  # Steps between two evaluations; one more after the last step
    max_loss_increase: float = 0.1  # Allowed increase over the loss before training, in nats per token
    on_exceed: Literal["stop", "warn"] = "stop"  # to a loss that rose by more: save and end, or a line

    def __post_init__(self) -> None:
        if self.eval_every < 1:
            raise FieldError("eval_every", f"must be 1 or more steps, not {self.eval_every}")
        if not self.max_loss_increase > 0:
            raise FieldError("max_loss_increase", f"must be above 0 nats, not {self.max_loss_increase}")
        if is_streaming(self.data):
            raise FieldError("data", "is measured whole: it cannot be a stream; `max_samples` takes the first rows")

    def check(self, spec: DecoderSpec, tokenizer: Tokenizer) -> None:
        """UserError if its rows are not there, or mean nothing to the model."""
        if spec.score is not None:
            raise UserError("forgetting: a model that scores writes nothing whose likelihood could be watched")
        self.data.check_source()
        self.data.prepare_tokenizer(tokenizer)


class ForgettingMonitor:
    """What the model could do before, and how well it still can. Without a rule nothing is measured."""

    def __init__(self, rule: ForgettingConfig | None, rows: DataLoader | None, folder: Path) -> None:
        self.rule, self.rows, self.folder = rule, rows, folder
        self.digest: str | None = None if rows is None else rows.fingerprint
        self.first: float | None = None  # loss before the first step
        self.last: float | None = None

    @staticmethod
    def open(
        rule: ForgettingConfig | None,
        tokenizer: Tokenizer,
        sizes: tuple[int, int],
        run: DistributedContext,
        folder: Path,
        fresh: bool,
    ) -> "ForgettingMonitor":
        """With its rows. `sizes` are rows of a step, and of a micro-batch; `folder` is that of the run."""
        if rule is None:
            return ForgettingMonitor(None, None, folder)
        return ForgettingMonitor(
            rule, build_dataloader(rule.data, tokenizer, *sizes, run, folder / "forgetting", fresh), folder
        )

    def begin(self, model: Decoder, run: DistributedContext, note: Callable[..., None], step: int) -> None:
        """Measure what there is to lose. A run that was ended for what it had lost does not go on unasked."""
        if self.rule is not None and self.first is None:
            self.measure(model, run, note, step)
        self.insist(step)

    def due(self, step: int, last: bool) -> bool:
        return self.rule is not None and (last or step % self.rule.eval_every == 0)

    def measure(self, model: Decoder, run: DistributedContext, note: Callable[..., None], step: int) -> None:
        """Read all rows, and tell."""
        assert self.rule is not None and self.rows is not None
        run.heartbeat.beat(step, "validate")
        start = time.perf_counter()
        self.last = cross_entropy.eval_loss(CrossEntropy(), model, self.rows, run)
        taken = {"forgetting/eval_time": round(time.perf_counter() - start, 3)}
        if self.first is None:
            self.first = self.last
            note(step, **{"forgetting/loss": self.last, **taken})
            return
        note(step, **{"forgetting/loss": self.last, "forgetting/loss_increase": self.last - self.first, **taken})
        if self.lost and self.rule.on_exceed == "warn":
            run.log(self.told(step))

    @property
    def lost(self) -> bool:
        """Whether the loss has risen by more than it may, or is no number."""
        if self.rule is None or self.first is None or self.last is None:
            return False
        return not self.last - self.first <= self.rule.max_loss_increase

    @property
    def ends(self) -> bool:
        """Whether the run is to end for it."""
        return self.rule is not None and self.lost and self.rule.on_exceed == "stop"

    def insist(self, step: int) -> None:
        """UserError if the run is to end. Its state is saved."""
        if self.ends:
            raise UserError(f"{self.told(step)}; its state is in {self.folder / STATE}: {AGAIN}; {ON}")

    def told(self, step: int) -> str:
        assert self.rule is not None and self.first is not None and self.last is not None
        rise = f"from {self.first:.4f} to {self.last:.4f} nats per token, by more than {self.rule.max_loss_increase:g}"
        return f"step {step}: the loss on {dataset_title(self.rule.data)} rose {rise} (forgetting.max_loss_increase)"

    def state_dict(self) -> dict[str, Any]:
        return {"digest": self.digest, "first": self.first, "last": self.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A run that went on without a rule, or begins to have one, has nothing to compare with yet."""
        if self.rule is not None and state["first"] is not None and state["digest"] != self.digest:
            raise UserError("forgetting.data: these are not the rows that the run began with: bring them back")
        self.digest = self.digest or state["digest"]
        self.first, self.last = state["first"], state["last"]
