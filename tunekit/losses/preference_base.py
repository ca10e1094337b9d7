"""What methods of preference have in common: losses of answers, and what they know of a whole step."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from tunekit.errors import FieldError
from tunekit.losses.sequence_logps import SequenceLogps


@dataclass(frozen=True)
class StepTotals:
    """What there is in a step, over all its micro-batches and ranks: numbers of no dimension."""

    answers: Tensor  # how many
    tokens: Tensor  # learnt ones of good answers
    lengths: Tensor  # all tokens of good answers and their prompts
    kl: Tensor  # of the model from its reference, estimated, and not below 0; on the device of the answers
    shift: Tensor  # mean of all log-ratios so far, on the same device
    whole: SequenceLogps | None = None  # all answers, without gradients, for losses that must see them at once
    first: int = 0  # where those of this micro-batch begin in there

    def behind(self, answers: SequenceLogps) -> "StepTotals":
        """As the next micro-batch sees it."""
        return replace(self, first=self.first + len(answers.logps))


@dataclass(frozen=True, kw_only=True)
class PreferenceLoss(ABC):
    """A term of what is minimised: the mean over pairs, or over answers one by one, times its weight."""

    about: ClassVar[str] = "for pairs, compared with a reference"  # what people are told of a group of losses
    each: ClassVar[int] = 2  # answers that are compared: two, or one that is marked
    compares: ClassVar[bool] = True  # with a reference
    whole: ClassVar[bool] = False  # whether it must know all answers of a step to value one
    others: ClassVar[bool] = False  # whether it asks for mismatched answers
    texts: ClassVar[bool] = False  # whether it asks for the log-probabilities of prompts

    weight: float = 1.0  # of this term, where there are several

    @abstractmethod
    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        """One number for each pair, (D / 2,), or for each answer, (D,)."""

    @abstractmethod
    def rewards(self, answers: SequenceLogps) -> Tensor:
        """What each answer is worth by this loss, (D,): for people to look at."""

    def mean(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        """The part that these answers have in the mean of a step, times the weight."""
        return self.weight * self.each * self(answers, step).sum() / step.answers


@dataclass(frozen=True, kw_only=True)
class LogRatioLoss(PreferenceLoss):
    """A loss of log-ratios to a reference, whose rewards are β log π(y|x) / π_ref(y|x)."""

    beta: float = 0.1  # how much it costs to leave the reference

    def __post_init__(self) -> None:
        if self.beta <= 0:
            raise FieldError("beta", f"must be above 0, not {self.beta}")

    def rewards(self, answers: SequenceLogps) -> Tensor:
        return self.beta * answers.ratios


def smoothed_logsigmoid(margin: Tensor, smoothing: float) -> Tensor:
    """-log σ(margin), with labels that are wrong as often as `smoothing` says."""
    return -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)


def check_label_smoothing(value: float, most: float = 0.5) -> None:
    if not 0 <= value < most:
        raise FieldError("label_smoothing", f"a share of labels from 0 to below {most}, not {value}")
