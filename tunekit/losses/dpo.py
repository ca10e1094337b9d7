"""Preference losses of pairs, as functions of the log-ratios to a reference model: DPO and its variants."""

from dataclasses import dataclass
from math import log
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.errors import check_range
from tunekit.losses.preference_base import LogRatioLoss, StepTotals, smoothed_logsigmoid
from tunekit.losses.sequence_logps import SequenceLogps

# f-divergences from the reference (f-DPO, arXiv:2309.16240). Each maps log-ratios to scores f'(π / π_ref).

MAX_EXPONENT = 80.0  # exp() of this is finite in fp32


@dataclass(frozen=True)
class ReverseKLDivergence:
    """Reverse KL, the divergence of DPO: the score is the log-ratio."""

    kind: ClassVar[str] = "reverse_kl"

    def __call__(self, log_ratios: Tensor) -> Tensor:
        return log_ratios


@dataclass(frozen=True)
class ForwardKLDivergence:
    """Forward KL: f'(t) = 1 - 1/t."""

    kind: ClassVar[str] = "forward_kl"

    def __call__(self, log_ratios: Tensor) -> Tensor:
        return 1 - torch.exp((-log_ratios).clamp(max=MAX_EXPONENT))


@dataclass(frozen=True)
class JSDivergence:
    """Jensen-Shannon divergence: f'(t) = log(2t / (1 + t))."""

    kind: ClassVar[str] = "js_divergence"

    def __call__(self, log_ratios: Tensor) -> Tensor:
        return log(2) + F.logsigmoid(log_ratios)


@dataclass(frozen=True)
class AlphaDivergence:
    """α-divergence: f'(t) = (t^(α - 1) - 1) / (α - 1). α = 1 is reverse_kl."""

    kind: ClassVar[str] = "alpha_divergence"
    alpha: float = 0.5

    def __call__(self, log_ratios: Tensor) -> Tensor:
        power = self.alpha - 1
        if abs(power) < 1e-6:
            return log_ratios
        return torch.exp((power * log_ratios).clamp(max=MAX_EXPONENT)).sub(1) / power


Divergence = ReverseKLDivergence | ForwardKLDivergence | JSDivergence | AlphaDivergence


@dataclass(frozen=True, kw_only=True)
class FDivergenceLoss(LogRatioLoss):
    """Loss of the difference between chosen and rejected scores; terms that depend only on the prompt cancel."""

    f_divergence: Divergence = ReverseKLDivergence()  # Divergence of the DPO objective

    def scores(self, answers: SequenceLogps) -> tuple[Tensor, Tensor]:
        """Scores of the chosen and of the rejected answers, (D / 2,) each."""
        chosen, rejected = answers.pairs
        return self.f_divergence(chosen.log_ratios), self.f_divergence(rejected.log_ratios)

    def margins(self, answers: SequenceLogps) -> Tensor:
        """β times the difference between chosen and rejected scores, (D / 2,)."""
        chosen, rejected = self.scores(answers)
        return self.beta * (chosen - rejected)

    def mean_margins(self, answers: SequenceLogps) -> Tensor:
        """Difference between chosen and rejected scores per token, (D / 2,)."""
        (chosen, rejected), (chosen_logps, rejected_logps) = self.scores(answers), answers.pairs
        return chosen / chosen_logps.num_tokens.clamp(min=1) - rejected / rejected_logps.num_tokens.clamp(min=1)


@dataclass(frozen=True, kw_only=True)
class DPO(FDivergenceLoss):
    """DPO (arXiv:2305.18290): -log σ(β (log π/π_ref (chosen) - log π/π_ref (rejected))).

    With `label_smoothing`, conservative DPO (cDPO): some labels may be wrong.
    """

    kind: ClassVar[str] = "dpo"
    label_smoothing: float = 0.0  # Fraction of pairs whose labels are assumed to be swapped

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "label_smoothing", ge=0, lt=0.5)

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        return smoothed_logsigmoid(self.margins(answers), self.label_smoothing)


@dataclass(frozen=True, kw_only=True)
class Sigmoid(DPO):
    """DPO under TRL's name."""

    kind: ClassVar[str] = "sigmoid"


@dataclass(frozen=True, kw_only=True)
class SigmoidNorm(DPO):
    """Length-normalized DPO (arXiv:2411.15124): DPO of scores per token, which does not favor long answers."""

    kind: ClassVar[str] = "sigmoid_norm"
    beta: float = 5.0  # Strength of the KL penalty, per token

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        return smoothed_logsigmoid(self.beta * self.mean_margins(answers), self.label_smoothing)


@dataclass(frozen=True, kw_only=True)
class Robust(DPO):
    """Robust DPO (arXiv:2403.00409): an unbiased estimate of the DPO loss if a known fraction of labels is flipped."""

    kind: ClassVar[str] = "robust"
    label_smoothing: float = 0.1  # Fraction of pairs whose labels are assumed to be swapped

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        margins, flip_rate = self.margins(answers), self.label_smoothing
        return (flip_rate * F.logsigmoid(-margins) - (1 - flip_rate) * F.logsigmoid(margins)) / (1 - 2 * flip_rate)


@dataclass(frozen=True, kw_only=True)
class Hinge(FDivergenceLoss):
    """Hinge loss of SLiC on the margin of DPO (arXiv:2305.10425, arXiv:2309.06657): max(0, 1 - margin)."""

    kind: ClassVar[str] = "hinge"

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        return F.relu(1 - self.margins(answers))


@dataclass(frozen=True, kw_only=True)
class IPO(FDivergenceLoss):
    """IPO (arXiv:2310.12036): squared difference between the margin per token and 1 / 2β. β is the paper's τ."""

    kind: ClassVar[str] = "ipo"

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        return (self.mean_margins(answers) - 1 / (2 * self.beta)) ** 2


@dataclass(frozen=True, kw_only=True)
class EXOPair(FDivergenceLoss):
    """EXO (arXiv:2402.00856): reverse KL from the model's preference probabilities to the smoothed labels."""

    kind: ClassVar[str] = "exo_pair"
    label_smoothing: float = 1e-3  # Label probability of the rejected answer

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "label_smoothing", gt=0, lt=1)

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        margins = self.margins(answers)
        log_probs = F.logsigmoid(margins), F.logsigmoid(-margins)
        labels = log(1 - self.label_smoothing), log(self.label_smoothing)
        return sum((x.exp() * (x - y) for x, y in zip(log_probs, labels, strict=True)), torch.zeros_like(margins))


@dataclass(frozen=True, kw_only=True)
class DiscoPOP(FDivergenceLoss):
    """DiscoPOP (arXiv:2406.08414): logistic loss for small or negative margins, exponential loss for large ones."""

    kind: ClassVar[str] = "discopop"
    discopop_tau: float = 0.05  # Width of the transition from the logistic to the exponential loss

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "discopop_tau", gt=0)

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        margins = self.margins(answers)
        blend = torch.sigmoid(margins / self.discopop_tau)
        return torch.lerp(-F.logsigmoid(margins), torch.exp((-margins).clamp(max=MAX_EXPONENT)), blend)


@dataclass(frozen=True, kw_only=True)
class NCAPair(LogRatioLoss):
    """NCA (arXiv:2402.05369): absolute rewards, which keep the likelihood of the chosen answer from falling."""

    kind: ClassVar[str] = "nca_pair"

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        chosen, rejected = (self.beta * side.log_ratios for side in answers.pairs)
        return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


@dataclass(frozen=True, kw_only=True)
class BCOPair(LogRatioLoss):
    """BCO of pairs (arXiv:2404.04656): a binary classifier of chosen and rejected answers. The logit is the reward."""

    kind: ClassVar[str] = "bco_pair"

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        chosen, rejected = (self.beta * side.log_ratios for side in answers.pairs)
        return -F.logsigmoid(chosen) - F.logsigmoid(-rejected)


@dataclass(frozen=True, kw_only=True)
class SPPOHard(LogRatioLoss):
    """SPPO (arXiv:2405.00675) with hard labels: regression of the log-ratios to 1 / 2β (chosen), -1 / 2β (rejected)."""

    kind: ClassVar[str] = "sppo_hard"

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        chosen, rejected = answers.pairs
        return (chosen.log_ratios - 0.5 / self.beta) ** 2 + (rejected.log_ratios + 0.5 / self.beta) ** 2


@dataclass(frozen=True, kw_only=True)
class APOZero(LogRatioLoss):
    """APO-zero (arXiv:2408.06266, eq. 7): raises the chosen likelihood, lowers the rejected one.

    Intended for chosen answers that are better than the model's own.
    """

    kind: ClassVar[str] = "apo_zero"

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        chosen, rejected = (self.beta * side.log_ratios for side in answers.pairs)
        return torch.sigmoid(-chosen) + torch.sigmoid(rejected)


@dataclass(frozen=True, kw_only=True)
class APODown(LogRatioLoss):
    """APO-down (arXiv:2408.06266, eq. 8): lowers both likelihoods, the rejected one further.

    Intended for chosen answers that are worse than the model's own.
    """

    kind: ClassVar[str] = "apo_down"

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        chosen, rejected = (self.beta * side.log_ratios for side in answers.pairs)
        return torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen)


@dataclass(frozen=True, kw_only=True)
class AOT(LogRatioLoss):
    """AOT (arXiv:2406.05882): compares the quantiles of the policy's margins with those of the reference's margins.

    The quantiles are those of all pairs of a step.
    """

    kind: ClassVar[str] = "aot"
    needs_full_step: ClassVar[bool] = True

    label_smoothing: float = 0.0  # Fraction of pairs whose labels are assumed to be swapped

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "label_smoothing", ge=0, lt=0.5)

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        assert step.all_answers is not None
        (all_chosen, all_rejected), (chosen, rejected) = step.all_answers.pairs, answers.pairs
        margins = all_chosen.logps - all_rejected.logps
        ref_margins = all_chosen.ref_logps - all_rejected.ref_logps
        matched = quantile_matched(margins, ref_margins, step.offset // 2, len(chosen.logps))
        return smoothed_logsigmoid(self.beta * (chosen.logps - rejected.logps - matched), self.label_smoothing)


@dataclass(frozen=True, kw_only=True)
class AOTUnpaired(AOT):
    """Unpaired AOT (arXiv:2406.05882): compares the quantiles of chosen log-ratios with those of rejected ones."""

    kind: ClassVar[str] = "aot_unpaired"

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        assert step.all_answers is not None
        all_chosen, all_rejected = (side.log_ratios for side in step.all_answers.pairs)
        chosen, rejected = (side.log_ratios for side in answers.pairs)
        span = step.offset // 2, len(chosen)
        matched_rejected = quantile_matched(all_chosen, all_rejected, *span)
        matched_chosen = quantile_matched(all_rejected, all_chosen, *span)
        up = smoothed_logsigmoid(self.beta * (chosen - matched_rejected), self.label_smoothing)
        down = smoothed_logsigmoid(self.beta * (matched_chosen - rejected), self.label_smoothing)
        return up + down - down.detach()  # both terms cover the same pairs: `down` only adds the gradient of rejected


DPOFamily = (
    DPO | Sigmoid | SigmoidNorm | Hinge | IPO | Robust | EXOPair | NCAPair | BCOPair | SPPOHard | AOT
    | AOTUnpaired | APOZero | APODown | DiscoPOP
)  # fmt: skip


def quantile_matched(values: Tensor, targets: Tensor, first: int, count: int) -> Tensor:
    """Elements of `targets` with the ranks that `values[first : first + count]` have in `values`."""
    ranks = values.argsort(stable=True).argsort()[first : first + count]
    return targets.sort().values[ranks]
