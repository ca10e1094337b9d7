"""Losses of single answers that are marked as good or bad."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.losses.preference_base import LogRatioLoss, StepTotals
from tunekit.losses.sequence_logps import SequenceLogps


@dataclass(frozen=True, kw_only=True)
class UnpairedLoss(LogRatioLoss):
    """A loss of answers that stand alone. Of pairs, the chosen answers are good and the rejected ones bad."""

    about: ClassVar[str] = "for single answers that are marked"
    each: ClassVar[int] = 1

    desirable_weight: float = 1.0  # weight of good answers
    undesirable_weight: float = 1.0  # weight of bad ones

    def value(self, reward: Tensor, answers: SequenceLogps) -> Tensor:
        """Rewards of good answers, and bad ones' the other way round: high is right."""
        return torch.where(answers.good, reward, -reward)

    def weighted(self, losses: Tensor, answers: SequenceLogps) -> Tensor:
        return losses * torch.where(answers.good, self.desirable_weight, self.undesirable_weight)


@dataclass(frozen=True, kw_only=True)
class KTO(UnpairedLoss):
    """KTO (arXiv:2402.01306): what an answer is worth above the divergence from the reference, as people value it.

    The divergence is estimated by answers of other rows of the step.
    """

    kind: ClassVar[str] = "kto"
    others: ClassVar[bool] = True

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        worth = self.value(self.beta * (answers.ratios - step.kl), answers)
        return self.weighted(1 - torch.sigmoid(worth), answers)


@dataclass(frozen=True, kw_only=True)
class BCO(UnpairedLoss):
    """BCO (arXiv:2404.04656): a classifier of good and bad whose logit is the reward above the mean of all so far."""

    kind: ClassVar[str] = "bco"
    whole: ClassVar[bool] = True

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        worth = self.value(self.beta * (answers.ratios - step.shift), answers)
        return self.weighted(-F.logsigmoid(worth), answers)


@dataclass(frozen=True, kw_only=True)
class APOZeroUnpaired(UnpairedLoss):
    """APO-zero (arXiv:2408.06266) of single answers: good ones rise above the reference, bad ones fall below it."""

    kind: ClassVar[str] = "apo_zero_unpaired"

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        return self.weighted(torch.sigmoid(-self.value(self.beta * answers.ratios, answers)), answers)
