"""Losses of a chosen and a rejected answer, by how much more likely than to a reference they are."""

from dataclasses import dataclass
from math import log
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.errors import FieldError
from tunekit.losses.preference_base import LogRatioLoss, StepTotals, check_label_smoothing, smoothed_logsigmoid
from tunekit.losses.sequence_logps import SequenceLogps

# Divergences from the reference (f-DPO, arXiv:2309.16240): a score f'(π / π_ref) of log-ratios.

HIGHEST = 80.0  # exponent that fp32 has room for


@dataclass(frozen=True)
class ReverseKLDivergence:
    """The divergence of DPO: the score is the log-ratio itself."""

    kind: ClassVar[str] = "reverse_kl"

    def __call__(self, ratios: Tensor) -> Tensor:
        return ratios


@dataclass(frozen=True)
class ForwardKLDivergence:
    """f'(t) = 1 - 1/t."""

    kind: ClassVar[str] = "forward_kl"

    def __call__(self, ratios: Tensor) -> Tensor:
        return 1 - torch.exp((-ratios).clamp(max=HIGHEST))


@dataclass(frozen=True)
class JSDivergence:
    """Jensen-Shannon: f'(t) = log 2t / (1 + t)."""

    kind: ClassVar[str] = "js_divergence"

    def __call__(self, ratios: Tensor) -> Tensor:
        return log(2) + F.logsigmoid(ratios)


@dataclass(frozen=True)
class AlphaDivergence:
    """f'(t) = (t^(α - 1) - 1) / (α - 1); α = 1 is reverse_kl."""

    kind: ClassVar[str] = "alpha_divergence"
    alpha: float = 0.5

    def __call__(self, ratios: Tensor) -> Tensor:
        power = self.alpha - 1
        return ratios if abs(power) < 1e-6 else torch.exp((power * ratios).clamp(max=HIGHEST)).sub(1) / power


Divergence = ReverseKLDivergence | ForwardKLDivergence | JSDivergence | AlphaDivergence


@dataclass(frozen=True, kw_only=True)
class FDivergenceLoss(LogRatioLoss):
    """A loss of the difference of two scores, in which what only depends on the prompt falls away."""

    f_divergence: Divergence = ReverseKLDivergence()  # Divergence of the DPO objective

    def scores(self, answers: SequenceLogps) -> tuple[Tensor, Tensor]:
        """Of the chosen answers and the rejected ones."""
        chosen, rejected = answers.pairs
        return self.f_divergence(chosen.ratios), self.f_divergence(rejected.ratios)

    def margins(self, answers: SequenceLogps) -> Tensor:
        """β times by how much the chosen answers score higher."""
        chosen, rejected = self.scores(answers)
        return self.beta * (chosen - rejected)

    def rates(self, answers: SequenceLogps) -> Tensor:
        """By how much the chosen answers score higher for a token."""
        (chosen, rejected), (longer, other) = self.scores(answers), answers.pairs
        return chosen / longer.tokens.clamp(min=1) - rejected / other.tokens.clamp(min=1)


@dataclass(frozen=True, kw_only=True)
class DPO(FDivergenceLoss):
    """DPO (arXiv:2305.18290): -log σ(β (log π/π_ref (chosen) - log π/π_ref (rejected))).

    With `smoothing`, the conservative cDPO: some labels may be wrong.
    """

    kind: ClassVar[str] = "dpo"
    label_smoothing: float = 0.0  # share of pairs that are the wrong way round

    def __post_init__(self) -> None:
        super().__post_init__()
        check_label_smoothing(self.label_smoothing)

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        return smoothed_logsigmoid(self.margins(answers), self.label_smoothing)


@dataclass(frozen=True, kw_only=True)
class Sigmoid(DPO):
    """DPO by the name that TRL has for it."""

    kind: ClassVar[str] = "sigmoid"


@dataclass(frozen=True, kw_only=True)
class SigmoidNorm(DPO):
    """LN-DPO (arXiv:2411.15124): DPO of scores for a token, which long answers do not win by their length."""

    kind: ClassVar[str] = "sigmoid_norm"
    beta: float = 5.0  # how much it costs to leave the reference, for a token

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        return smoothed_logsigmoid(self.beta * self.rates(answers), self.label_smoothing)


@dataclass(frozen=True, kw_only=True)
class Robust(FDivergenceLoss):
    """Robust DPO (arXiv:2403.00409): its mean over labels of which a known share is flipped is DPO's over true ones."""

    kind: ClassVar[str] = "robust"
    label_smoothing: float = 0.1  # share of pairs that are the wrong way round

    def __post_init__(self) -> None:
        super().__post_init__()
        check_label_smoothing(self.label_smoothing)

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        margins, wrong = self.margins(answers), self.label_smoothing
        return (wrong * F.logsigmoid(-margins) - (1 - wrong) * F.logsigmoid(margins)) / (1 - 2 * wrong)


@dataclass(frozen=True, kw_only=True)
class Hinge(FDivergenceLoss):
    """SLiC's hinge on DPO's margin (arXiv:2305.10425, arXiv:2309.06657)."""

    kind: ClassVar[str] = "hinge"

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        return F.relu(1 - self.margins(answers))


@dataclass(frozen=True, kw_only=True)
class IPO(FDivergenceLoss):
    """IPO (arXiv:2310.12036): margins for a token are drawn to 1 / 2β, and not without end. β is the paper's τ."""

    kind: ClassVar[str] = "ipo"

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        return (self.rates(answers) - 1 / (2 * self.beta)) ** 2


@dataclass(frozen=True, kw_only=True)
class EXOPair(FDivergenceLoss):
    """EXO (arXiv:2402.00856): the reverse KL of what the model prefers from what the labels say."""

    kind: ClassVar[str] = "exo_pair"
    label_smoothing: float = 1e-3  # probability that is left for the rejected answer

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.label_smoothing < 1:
            raise FieldError("label_smoothing", f"a probability above 0 and below 1, not {self.label_smoothing}")

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        margins = self.margins(answers)
        logs = F.logsigmoid(margins), F.logsigmoid(-margins)
        labels = log(1 - self.label_smoothing), log(self.label_smoothing)
        return sum((x.exp() * (x - wanted) for x, wanted in zip(logs, labels, strict=True)), torch.zeros_like(margins))


@dataclass(frozen=True, kw_only=True)
class DiscoPOP(FDivergenceLoss):
    """DiscoPOP (arXiv:2406.08414): logistic where the margin is small or negative, exponential where it is large."""

    kind: ClassVar[str] = "discopop"
    discopop_tau: float = 0.05  # how sharply one passes into the other

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.discopop_tau <= 0:
            raise FieldError("discopop_tau", f"must be above 0, not {self.discopop_tau}")

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        margins = self.margins(answers)
        blend = torch.sigmoid(margins / self.discopop_tau)
        return torch.lerp(-F.logsigmoid(margins), torch.exp((-margins).clamp(max=HIGHEST)), blend)


@dataclass(frozen=True, kw_only=True)
class NCAPair(LogRatioLoss):
    """NCA (arXiv:2402.05369): absolute rewards, so that the chosen answer does not become less likely."""

    kind: ClassVar[str] = "nca_pair"

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        chosen, rejected = (self.beta * side.ratios for side in answers.pairs)
        return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


@dataclass(frozen=True, kw_only=True)
class BCOPair(LogRatioLoss):
    """BCO of pairs (arXiv:2404.04656): a classifier of good and bad whose logit is the reward."""

    kind: ClassVar[str] = "bco_pair"

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        chosen, rejected = (self.beta * side.ratios for side in answers.pairs)
        return -F.logsigmoid(chosen) - F.logsigmoid(-rejected)


@dataclass(frozen=True, kw_only=True)
class SPPOHard(LogRatioLoss):
    """SPPO (arXiv:2405.00675) with a winner and a loser: log-ratios are drawn to 1 / 2β and to -1 / 2β."""

    kind: ClassVar[str] = "sppo_hard"

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        chosen, rejected = answers.pairs
        return (chosen.ratios - 0.5 / self.beta) ** 2 + (rejected.ratios + 0.5 / self.beta) ** 2


@dataclass(frozen=True, kw_only=True)
class APOZero(LogRatioLoss):
    """APO-zero (arXiv:2408.06266, eq. 7), for chosen answers that are better than the model's: they rise."""

    kind: ClassVar[str] = "apo_zero"

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        chosen, rejected = (self.beta * side.ratios for side in answers.pairs)
        return torch.sigmoid(-chosen) + torch.sigmoid(rejected)


@dataclass(frozen=True, kw_only=True)
class APODown(LogRatioLoss):
    """APO-down (arXiv:2408.06266, eq. 8), for chosen answers that are worse than the model's: both fall."""

    kind: ClassVar[str] = "apo_down"

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        chosen, rejected = (self.beta * side.ratios for side in answers.pairs)
        return torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen)


@dataclass(frozen=True, kw_only=True)
class AOT(LogRatioLoss):
    """AOT (arXiv:2406.05882): the margins of a whole step, in order, shall lie above those of the reference."""

    kind: ClassVar[str] = "aot"
    whole: ClassVar[bool] = True

    label_smoothing: float = 0.0  # share of pairs that are the wrong way round

    def __post_init__(self) -> None:
        super().__post_init__()
        check_label_smoothing(self.label_smoothing)

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        assert step.whole is not None
        mine, (chosen, rejected) = step.whole.pairs, answers.pairs
        ours = mine[0].logps - mine[1].logps
        theirs = mine[0].reference - mine[1].reference
        lower = partners(ours, theirs, step.first // 2, len(chosen.logps))
        return smoothed_logsigmoid(self.beta * (chosen.logps - rejected.logps - lower), self.label_smoothing)


@dataclass(frozen=True, kw_only=True)
class AOTUnpaired(AOT):
    """AOT (arXiv:2406.05882) of answers by themselves: in order, the chosen ones shall lie above the rejected ones."""

    kind: ClassVar[str] = "aot_unpaired"

    def __call__(self, answers: SequenceLogps, step: StepTotals) -> Tensor:
        assert step.whole is not None
        above, below = (side.ratios for side in step.whole.pairs)
        chosen, rejected = (side.ratios for side in answers.pairs)
        place = step.first // 2, len(chosen)
        up = smoothed_logsigmoid(self.beta * (chosen - partners(above, below, *place)), self.label_smoothing)
        down = smoothed_logsigmoid(self.beta * (partners(below, above, *place) - rejected), self.label_smoothing)
        return up + down - down.detach()  # these are the same pairs, of which the other side learns


def partners(values: Tensor, others: Tensor, first: int, count: int) -> Tensor:
    """What stands in `others` where some of `values` do, once both are in order."""
    at = values.argsort(stable=True).argsort()[first : first + count]
    return others.sort().values[at]
