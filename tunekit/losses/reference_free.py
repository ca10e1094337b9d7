"""Losses of a chosen and a rejected answer that need no reference: how likely they are is all that counts."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tunekit.errors import FieldError
from tunekit.losses.preference_base import PreferenceLoss, StepTotals, check_label_smoothing, smoothed_logsigmoid
from tunekit.losses.sequence_logps import SequenceLogps

SUREST = -1e-9  # log-probability of a token above which all odds are taken for the same


@dataclass(frozen=True, kw_only=True)
class SFTTerm(PreferenceLoss):
    """Negative log-likelihood of the chosen answers; beside `dpo` it is what RPO adds (arXiv:2404.19733)."""

    kind: ClassVar[str] = "sft"
    about: ClassVar[str] = "for pairs, without a reference"
    compares: ClassVar[bool] = False

    reduction: Literal["token_mean", "sequence_mean"] = (
        "token_mean"  # of what the mean is taken: all tokens, or first those of each answer
    )

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        chosen, _ = answers.pairs
        return -chosen.rates if self.reduction == "sequence_mean" else -chosen.logps * step.answers / 2 / step.tokens

    def rewards(self, answers: SequenceLogps) -> Tensor:
        return answers.logps


@dataclass(frozen=True, kw_only=True)
class ReferenceFreeLoss(PreferenceLoss):
    """A loss of pairs without a reference."""

    about: ClassVar[str] = "for pairs, without a reference"
    compares: ClassVar[bool] = False

    # Strength of the KL penalty (DPO family, KTO, BCO); reward scale (CPO, SimPO); weight of the odds ratio (ORPO)
    beta: float = 0.1
    label_smoothing: float = 0.0  # share of pairs that are the wrong way round

    def __post_init__(self) -> None:
        check_label_smoothing(self.label_smoothing)
        if self.beta <= 0:
            raise FieldError("beta", f"must be above 0, not {self.beta}")

    def margins(self, answers: SequenceLogps) -> Tensor:
        """Rewards of the chosen answers above those of the rejected ones."""
        rewards = self.rewards(answers)
        return rewards[::2] - rewards[1::2]


@dataclass(frozen=True, kw_only=True)
class CPO(ReferenceFreeLoss):
    """CPO (arXiv:2401.08417): DPO with a reference that finds all answers alike, and the likelihood of the chosen."""

    kind: ClassVar[str] = "cpo"
    cpo_alpha: float = 1.0  # weight of the negative log-likelihood of chosen answers, for a token

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        return smoothed_logsigmoid(self.margins(answers), self.label_smoothing) + self.cpo_alpha * SFTTerm()(
            answers, step
        )

    def rewards(self, answers: SequenceLogps) -> Tensor:
        return self.beta * answers.logps


@dataclass(frozen=True, kw_only=True)
class SimPO(ReferenceFreeLoss):
    """SimPO (arXiv:2405.14734): the log-probability of a token is the reward, and is to differ by a margin γ."""

    kind: ClassVar[str] = "simpo"
    beta: float = 2.0  # how much is made of a difference
    simpo_gamma: float = 1.0  # by how much the chosen answer is to be better

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        return smoothed_logsigmoid(self.margins(answers) - self.simpo_gamma, self.label_smoothing)

    def rewards(self, answers: SequenceLogps) -> Tensor:
        return self.beta * answers.rates


@dataclass(frozen=True, kw_only=True)
class AlphaPO(SimPO):
    """AlphaPO (arXiv:2501.03884): SimPO of the reward (1 - p^-α) / α, which is log p where α is 0."""

    kind: ClassVar[str] = "alphapo"
    alpha: float = 0.25  # which way the reward bends

    def rewards(self, answers: SequenceLogps) -> Tensor:
        if self.alpha == 0:
            return super().rewards(answers)
        return self.beta * -torch.expm1(-self.alpha * answers.rates) / self.alpha


@dataclass(frozen=True, kw_only=True)
class ORPO(ReferenceFreeLoss):
    """ORPO (arXiv:2403.07691): likelihood of the chosen rows, and odds of a token of one answer against the other's.

    β is the paper's λ.
    """

    kind: ClassVar[str] = "orpo"
    texts: ClassVar[bool] = True

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        chosen, rejected = answers.pairs
        odds = log_odds(chosen.rates) - log_odds(rejected.rates)
        likelihood = chosen.texts * step.answers / 2 / step.lengths  # of the prompt too, as its authors' code has it
        return self.beta * smoothed_logsigmoid(odds, self.label_smoothing) - likelihood

    def rewards(self, answers: SequenceLogps) -> Tensor:
        return self.beta * answers.rates


def log_odds(logs: Tensor) -> Tensor:
    """log p / (1 - p) of log p: either form is exact where the other is not, and no gradient of it is NaN."""
    near = -torch.expm1(-logs.clamp(-1, SUREST)).log()
    return torch.where(logs > -0.7, near, logs - torch.log1p(-torch.exp(logs.clamp(max=-0.5))))
