"""Preference losses of pairs without a reference model: CPO, SimPO, ORPO and an SFT term."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tunekit.errors import check_range
from tunekit.losses.preference_base import PreferenceLoss, StepTotals, smoothed_logsigmoid
from tunekit.losses.sequence_logps import SequenceLogps

MAX_LOG_PROB = -1e-9  # log-probabilities are clamped to this, which keeps odds finite


@dataclass(frozen=True, kw_only=True)
class SFTTerm(PreferenceLoss):
    """Negative log-likelihood of the chosen answers. With `dpo` it forms RPO (arXiv:2404.19733)."""

    kind: ClassVar[str] = "sft"
    description: ClassVar[str] = "for pairs, without a reference"
    needs_reference: ClassVar[bool] = False

    # Mean over all tokens, or over the means of the answers
    reduction: Literal["token_mean", "sequence_mean"] = "token_mean"

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        chosen, _ = answers.pairs
        if self.reduction == "sequence_mean":
            return -chosen.mean_logps
        return -chosen.logps * step.num_answers / 2 / step.num_chosen_tokens

    def rewards(self, answers: SequenceLogps) -> Tensor:
        return answers.logps


@dataclass(frozen=True, kw_only=True)
class ReferenceFreeLoss(PreferenceLoss):
    """Loss of pairs without a reference."""

    description: ClassVar[str] = "for pairs, without a reference"
    needs_reference: ClassVar[bool] = False

    # Strength of the KL penalty (DPO family, KTO, BCO); reward scale (CPO, SimPO); weight of the odds ratio (ORPO)
    beta: float = 0.1
    label_smoothing: float = 0.0  # Fraction of pairs whose labels are assumed to be swapped

    def __post_init__(self) -> None:
        check_range(self, "label_smoothing", ge=0, lt=0.5)
        check_range(self, "beta", gt=0)

    def margins(self, answers: SequenceLogps) -> Tensor:
        """Differences between chosen and rejected rewards, (D / 2,)."""
        rewards = self.rewards(answers)
        return rewards[::2] - rewards[1::2]


@dataclass(frozen=True, kw_only=True)
class CPO(ReferenceFreeLoss):
    """CPO (arXiv:2401.08417): DPO with a uniform reference, plus the negative log-likelihood of chosen answers."""

    kind: ClassVar[str] = "cpo"
    cpo_alpha: float = 1.0  # Weight of the negative log-likelihood per token of the chosen answers

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        likelihood = self.cpo_alpha * SFTTerm()(answers, step)
        return smoothed_logsigmoid(self.margins(answers), self.label_smoothing) + likelihood

    def rewards(self, answers: SequenceLogps) -> Tensor:
        return self.beta * answers.logps


@dataclass(frozen=True, kw_only=True)
class SimPO(ReferenceFreeLoss):
    """SimPO (arXiv:2405.14734): the reward is the mean log-probability per token, with a target margin γ."""

    kind: ClassVar[str] = "simpo"
    beta: float = 2.0  # Reward scale
    simpo_gamma: float = 1.0  # Target margin between chosen and rejected rewards

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        return smoothed_logsigmoid(self.margins(answers) - self.simpo_gamma, self.label_smoothing)

    def rewards(self, answers: SequenceLogps) -> Tensor:
        return self.beta * answers.mean_logps


@dataclass(frozen=True, kw_only=True)
class AlphaPO(SimPO):
    """AlphaPO (arXiv:2501.03884): SimPO with the reward (1 - p^-α) / α, which is log p for α = 0."""

    kind: ClassVar[str] = "alphapo"
    alpha: float = 0.25  # Shape of the reward function; 0 is SimPO

    def rewards(self, answers: SequenceLogps) -> Tensor:
        if self.alpha == 0:
            return super().rewards(answers)
        return self.beta * -torch.expm1(-self.alpha * answers.mean_logps) / self.alpha


@dataclass(frozen=True, kw_only=True)
class ORPO(ReferenceFreeLoss):
    """ORPO (arXiv:2403.07691): negative log-likelihood of chosen rows, plus β times the log-odds ratio loss.

    β is the paper's λ.
    """

    kind: ClassVar[str] = "orpo"
    needs_prompt_logps: ClassVar[bool] = True

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        chosen, rejected = answers.pairs
        log_odds_ratio = log_odds(chosen.mean_logps) - log_odds(rejected.mean_logps)
        # Includes the prompt, as in the authors' code
        likelihood = chosen.full_logps * step.num_answers / 2 / step.num_chosen_full_tokens
        return self.beta * smoothed_logsigmoid(log_odds_ratio, self.label_smoothing) - likelihood

    def rewards(self, answers: SequenceLogps) -> Tensor:
        return self.beta * answers.mean_logps


ReferenceFreeFamily = SFTTerm | CPO | SimPO | AlphaPO | ORPO


def log_odds(logp: Tensor) -> Tensor:
    """log(p / (1 - p)) of log p.

    Uses one form for p near 1 and another one below, each where it is accurate, so that no gradient is NaN.
    """
    near_one = -torch.expm1(-logp.clamp(-1, MAX_LOG_PROB)).log()
    return torch.where(logp > -0.7, near_one, logp - torch.log1p(-torch.exp(logp.clamp(max=-0.5))))
