"""Preference losses of single answers that are labeled as desirable or undesirable: KTO, BCO, APO-zero."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.losses.preference_base import LogRatioLoss, StepTotals
from tunekit.losses.sequence_logps import SequenceLogps


@dataclass(frozen=True, kw_only=True)
class UnpairedLoss(LogRatioLoss):
    """Loss of single answers. In pairs, chosen answers are desirable and rejected ones are undesirable."""

    description: ClassVar[str] = "for single answers that are marked"
    docs_per_item: ClassVar[int] = 1

    desirable_weight: float = 1.0  # Weight of desirable answers
    undesirable_weight: float = 1.0  # Weight of undesirable answers

    def signed(self, reward: Tensor, answers: SequenceLogps) -> Tensor:
        """Rewards of desirable answers, and negated rewards of undesirable ones, (D,)."""
        return torch.where(answers.is_desirable, reward, -reward)

    def weighted(self, losses: Tensor, answers: SequenceLogps) -> Tensor:
        return losses * torch.where(answers.is_desirable, self.desirable_weight, self.undesirable_weight)


@dataclass(frozen=True, kw_only=True)
class KTO(UnpairedLoss):
    """KTO (arXiv:2402.01306): 1 - σ(±β (log π/π_ref - z)), with + for desirable answers and - for undesirable ones.

    The reference point z is the KL divergence from the reference, estimated from mismatched answers of the step.
    """

    kind: ClassVar[str] = "kto"
    needs_mismatched: ClassVar[bool] = True

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        signed_rewards = self.signed(self.beta * (answers.log_ratios - step.kl), answers)
        return self.weighted(1 - torch.sigmoid(signed_rewards), answers)


@dataclass(frozen=True, kw_only=True)
class BCO(UnpairedLoss):
    """BCO (arXiv:2404.04656): a binary classifier of desirable answers.

    Its logit is the difference between the reward and the running mean of all rewards.
    """

    kind: ClassVar[str] = "bco"
    needs_full_step: ClassVar[bool] = True

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        signed_logits = self.signed(self.beta * (answers.log_ratios - step.mean_log_ratio), answers)
        return self.weighted(-F.logsigmoid(signed_logits), answers)


@dataclass(frozen=True, kw_only=True)
class APOZeroUnpaired(UnpairedLoss):
    """APO-zero (arXiv:2408.06266) of single answers: raises desirable likelihoods and lowers undesirable ones."""

    kind: ClassVar[str] = "apo_zero_unpaired"

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        return self.weighted(torch.sigmoid(-self.signed(self.beta * answers.log_ratios, answers)), answers)


UnpairedFamily = KTO | BCO | APOZeroUnpaired
