"""Base classes of preference losses, and the totals of a step that they may use."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from tunekit.errors import check_range
from tunekit.losses.sequence_logps import SequenceLogps


@dataclass(frozen=True)
class StepTotals:
    """Totals over all micro-batches and ranks of a step. Tensors are scalars."""

    num_answers: Tensor
    num_chosen_tokens: Tensor  # target tokens of chosen or desirable answers
    num_chosen_full_tokens: Tensor  # tokens of chosen or desirable answers and their prompts
    kl: Tensor  # estimated KL divergence from the reference, >= 0; on the device of the answers
    mean_log_ratio: Tensor  # running mean of all log-ratios, on the device of the answers
    all_answers: SequenceLogps | None = None  # all answers of the step without gradients, for needs_full_step losses
    offset: int = 0  # index in `all_answers` of the first answer of this micro-batch

    def after(self, answers: SequenceLogps) -> "StepTotals":
        """Totals for the micro-batch that follows `answers`."""
        return replace(self, offset=self.offset + len(answers.logps))


@dataclass(frozen=True, kw_only=True)
class PreferenceLoss(ABC):
    """Term of a preference objective: the mean over pairs or over single answers, times its weight."""

    description: ClassVar[str] = "for pairs, compared with a reference"  # heading of this group of losses in the docs
    docs_per_item: ClassVar[int] = 2  # 2: pairs, 1: single answers
    needs_reference: ClassVar[bool] = True  # compares log-probabilities with those of a reference model
    needs_full_step: ClassVar[bool] = False  # needs the log-probabilities of all answers of a step
    needs_mismatched: ClassVar[bool] = False  # estimates its KL term from mismatched answers
    needs_prompt_logps: ClassVar[bool] = False  # needs the log-probabilities of prompt tokens

    weight: float = 1.0  # Weight of this term if there are several

    @abstractmethod
    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        """Loss of each pair, (D / 2,), or of each answer, (D,)."""

    @abstractmethod
    def rewards(self, answers: SequenceLogps) -> Tensor:
        """Implicit reward of each answer, (D,), for metrics."""

    def mean(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        """Contribution of these answers to the mean over the step, times the weight."""
        return self.weight * self.docs_per_item * self(answers, step).sum() / step.num_answers


@dataclass(frozen=True, kw_only=True)
class LogRatioLoss(PreferenceLoss):
    """Loss of log-ratios to a reference. Rewards are β log(π(y|x) / π_ref(y|x))."""

    beta: float = 0.1  # Strength of the KL penalty

    def __post_init__(self) -> None:
        check_range(self, "beta", gt=0)

    def rewards(self, answers: SequenceLogps) -> Tensor:
        return self.beta * answers.log_ratios


def smoothed_logsigmoid(margin: Tensor, smoothing: float) -> Tensor:
    """-(1 - smoothing) log σ(margin) - smoothing log σ(-margin): labels are flipped with probability `smoothing`."""
    return -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)
