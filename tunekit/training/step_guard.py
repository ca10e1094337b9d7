"""Whether a step may move the weights: its loss and its gradient are numbers, and far above none that came before.

All ranks see the same two numbers, which are sums over them, and so decide alike without a word.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from tunekit.errors import FieldError
from tunekit.kernels.device_to_host import HostCopy

FEW = 8  # steps of which a median says little
SHOWN = 16  # rows that a message names


@dataclass(frozen=True)
class StepGuardConfig:
    """What becomes of a step that would spoil the weights."""

    kind: ClassVar[str] = "step_guard"
    # NaN or Inf in loss or gradient norm
    on_nan: Literal["stop", "skip", "ignore"] = (
        "stop"  # a loss or gradient that is no number: end, pass the step over, go on
    )
    # A step is a spike above this multiple of the running median; null: off
    spike_factor: float | None = (
        None  # a step is a spike from so many times the median of the last ones on; none: never
    )
    # Metric that is checked for spikes
    spike_metric: Literal["grad_norm", "loss"] = (
        "grad_norm"  # what is watched for spikes: the length of the gradient, or the loss
    )
    spike_window: int = 50  # Steps in the running median
    # `rollback`: restore the last training state and skip the data since then
    on_spike: Literal["stop", "skip", "rollback"] = (
        "skip"  # to a spike; back: to the last state, past the rows since then
    )
    max_interventions: int = 3  # Consecutive skipped steps, or rollbacks per run, before the run stops

    def __post_init__(self) -> None:
        if self.spike_factor is not None and not 1 < self.spike_factor < math.inf:
            raise FieldError(
                "spike_factor", f"must be above 1, not {self.spike_factor}: it is so many times the median"
            )
        if self.spike_window < FEW:
            raise FieldError("spike_window", f"must be {FEW} steps or more, not {self.spike_window}")
        if self.max_interventions < 1:
            raise FieldError("max_interventions", f"must be 1 or more, not {self.max_interventions}")

    @property
    def holds(self) -> bool:
        """Whether there is more to decide than the end of the run."""
        return self.on_nan == "skip" or self.spike_factor is not None

    @property
    def returns(self) -> bool:
        """Whether a run may go back to a state, for which there must be one from the start on."""
        return self.spike_factor is not None and self.on_spike == "rollback"

    def refusal(self, early: bool) -> str | None:
        """Why nothing can be held where weights move inside a backward pass, and how to mend it."""
        if early and self.holds:
            what = "on_nan: skip" if self.on_nan == "skip" else "spike_factor"
            return f"{what} comes too late with memory.optimizer_in_bwd, which moves weights at once: leave one out"
        return None


class Anomaly(NamedTuple):
    """What is wrong with a step, and what is done about it."""

    step: int  # counted from 0
    what: str
    answer: str

    def told(self, rows: Sequence[str], mend: str) -> str:
        return f"step {self.step + 1}: {self.what}; its rows: {format_rows(rows) or 'no longer known'}; {mend}"


class StepGuard:
    """Sees every step, and says which comes next. All that it knows is in a state."""

    def __init__(self, rule: StepGuardConfig, device: torch.device) -> None:
        # What only ends a run can be read late: until then nothing leaves the process, so what has moved is lost with
        # it, and a GPU is never waited for. What a step may do to a run that goes on must be known before it moves.
        self.rule, self.early = rule, rule.holds or device.type == "cpu"
        self.fault: Anomaly | None = None
        self.step = self.next = 0
        self.unread: list[tuple[int, HostCopy]] = []
        self.passed = 0  # steps whose rows ways back have left behind
        self.times = 0  # ways back
        self.row = 0  # steps passed over in a row
        self.last: deque[float] = deque(maxlen=rule.spike_window)

    def over(self, start: int, end: int) -> Iterator[int]:
        """The steps of a run, some of them again after a way back."""
        self.next = start
        while self.next < end:
            self.step, self.next = self.next, self.next + 1
            yield self.step

    def data(self, step: int) -> int:
        """Which rows a step reads: those of the step that it would be without ways back."""
        return step + self.passed

    def allows(self, loss: Tensor | None, norm: Tensor) -> bool:
        """Whether the weights may move, asked when all gradients are there."""
        if self.rule.on_nan == "ignore" and self.rule.spike_factor is None:
            return True
        self.unread.append((self.step, HostCopy(torch.stack([norm if loss is None else loss.to(norm), norm]))))
        if self.early:
            self.look()
        return self.fault is None

    def look(self, lag: int = 0) -> None:
        """Read what was not read yet, but for that many of the last steps, on which the device may still be at work.

        All of it must be read before anything that is made of the weights is kept.
        """
        count = max(0, len(self.unread) - lag)
        unread, self.unread = self.unread[:count], self.unread[count:]
        for step, copy in unread:
            loss, norm = copy.read()
            self.fault = self.fault or self.judged(step, loss, norm)

    def judged(self, step: int, loss: float, norm: float) -> Anomaly | None:
        value = loss if self.rule.spike_metric == "loss" else norm
        if not (math.isfinite(loss) and math.isfinite(norm)):
            what = f"the loss is {loss}" if not math.isfinite(loss) else f"the length of the gradient is {norm}"
            return None if self.rule.on_nan == "ignore" else self.bad(step, what, self.rule.on_nan)
        if (
            self.rule.spike_factor is not None
            and len(self.last) >= FEW
            and value > self.rule.spike_factor * median(self.last)
        ):
            times, word = value / median(self.last), {"loss": "loss", "grad_norm": "grad_norm"}[self.rule.spike_metric]
            what = f"the {word} is {value:.4g}, {times:.3g} times the median of the last {len(self.last)} steps"
            return self.bad(step, what, self.rule.on_spike)
        self.last.append(value)
        self.row = 0
        return None

    def bad(self, step: int, what: str, answer: str) -> Anomaly:
        """With the answer to it, as long as it did not come too often."""
        self.row += answer == "skip"
        often = {"skip": self.row, "rollback": self.times + 1}.get(answer, 0)
        if often > self.rule.max_interventions:
            what, answer = f"{what}, behind {self.rule.max_interventions} {WAYS[answer]}", "stop"
        return Anomaly(step, what, answer)

    def go_back(self, restore: Callable[[], int]) -> int:
        """`restore` brings back the last state, whose step comes again, with the rows that follow the bad ones."""
        assert self.fault is not None
        behind, times = self.data(self.fault.step) + 1, self.times + 1
        self.next = restore()
        self.passed, self.times, self.fault = behind - self.next, times, None
        return self.next

    def state_dict(self) -> dict[str, Any]:
        return {"passed": self.passed, "times": self.times, "row": self.row, "last": list(self.last)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passed, self.times, self.row = state["passed"], state["times"], state["row"]
        self.last = deque(state["last"], self.rule.spike_window)


WAYS = {"skip": "that were passed over in a row", "rollback": "rollbacks"}


def format_rows(rows: Sequence[str]) -> str:
    """Rows by their files: `chats.jsonl:3, 17, 40 and 12 more`."""
    found = []
    split = [(where.rstrip("0123456789"), where) for where in rows[:SHOWN]]
    for name, group in groupby(split, key=lambda pair: pair[0]):
        numbers = [where.removeprefix(name) for _, where in group]
        found.append(name + ", ".join(filter(None, numbers)))
    more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
    return ", ".join(found) + more
