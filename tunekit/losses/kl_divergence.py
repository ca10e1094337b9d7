"""Distillation losses: KL divergences between student and teacher distributions, summed over target tokens.

p is the student's and q the teacher's distribution, both softmax(logits / temperature).
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tunekit.data.dataloader.batch import Batch
from tunekit.errors import FieldError, check_range
from tunekit.kernels.kl_divergence import METRICS, KLMixture, TeacherTargets, linear_kl_divergence
from tunekit.losses.cross_entropy import local_targets
from tunekit.models.decoder import Decoder, Head

MetricTensors = dict[str, Tensor]


@dataclass(frozen=True)
class KLDivergenceLoss:
    """Options of all distillation losses. This class is forward KL."""

    temperature: float = 1.0  # Temperature of student and teacher; the loss is not multiplied by its square
    kd_ratio: float = 1.0  # Weight of the distillation loss; the rest is cross-entropy on the data

    def __post_init__(self) -> None:
        check_range(self, "temperature", gt=0)
        if not 0 < self.kd_ratio <= 1:
            raise FieldError("kd_ratio", f"must be > 0 and <= 1, got {self.kd_ratio}. For 0, use the recipe sft.")

    def __call__(self, model: Decoder, batch: Batch, teacher: TeacherTargets) -> tuple[Tensor, MetricTensors]:
        """Loss and metrics, summed over the target tokens of a batch."""
        batch.require_equal_weights()
        targets, target_rows = local_targets(model, batch)
        metrics: list[Tensor] = []

        def read(hidden: Tensor, head: Head) -> Tensor:
            states = hidden.flatten(0, 1)
            loss, sums = linear_kl_divergence(states, targets, head, teacher, self.mixture(), target_rows)
            metrics.append(sums)
            return loss

        loss = model(batch.tokens, batch.positions, batch.layout, head_fn=read, sharded=True)
        return loss, dict(zip(METRICS, metrics[0].unbind(), strict=True))

    def mixture(self) -> KLMixture:
        return self.make_mixture(1.0)

    def make_mixture(self, *weights: float) -> KLMixture:
        """Mixture with the given weight and skew of KL(q || p), then weight and skew of KL(p || q)."""
        return KLMixture(*weights, temperature=self.temperature, ce_weight=1.0 - self.kd_ratio)


@dataclass(frozen=True)
class ForwardKL(KLDivergenceLoss):
    """KL(q || p): mode-covering, the standard loss of knowledge distillation (arXiv:1503.02531)."""

    kind: ClassVar[str] = "forward_kl"


@dataclass(frozen=True)
class ReverseKL(KLDivergenceLoss):
    """KL(p || q): mode-seeking, as in MiniLLM (arXiv:2306.08543)."""

    kind: ClassVar[str] = "reverse_kl"

    def mixture(self) -> KLMixture:
        return self.make_mixture(0.0, 0.0, 1.0)


@dataclass(frozen=True)
class SymmetricKL(KLDivergenceLoss):
    """KL(q || p) + KL(p || q), Jeffreys' divergence."""

    kind: ClassVar[str] = "symmetric_kl"

    def mixture(self) -> KLMixture:
        return self.make_mixture(1.0, 0.0, 1.0)


@dataclass(frozen=True)
class SkewedBase(KLDivergenceLoss):
    """Base of KL divergences from a distribution to a mixture of both."""

    alpha: float = 0.1  # Weight in the mixture of the distribution that is compared with it

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "alpha", gt=0, lt=1)


@dataclass(frozen=True)
class SkewedKL(SkewedBase):
    """Skewed KL of DistiLLM (arXiv:2402.03898): KL(q || α q + (1 - α) p)."""

    kind: ClassVar[str] = "skewed_kl"

    def mixture(self) -> KLMixture:
        return self.make_mixture(1.0, self.alpha)


@dataclass(frozen=True)
class SkewedReverseKL(SkewedBase):
    """Skewed reverse KL of DistiLLM (arXiv:2402.03898): KL(p || α p + (1 - α) q)."""

    kind: ClassVar[str] = "skewed_reverse_kl"

    def mixture(self) -> KLMixture:
        return self.make_mixture(0.0, 0.0, 1.0, self.alpha)


@dataclass(frozen=True)
class JensenShannon(KLDivergenceLoss):
    """Generalized Jensen-Shannon divergence of GKD (arXiv:2306.13649).

    β KL(q || m) + (1 - β) KL(p || m) with m = β q + (1 - β) p. It vanishes for β = 0 and β = 1, so these select the
    limits of its gradient: KL(q || p) and KL(p || q).
    """

    kind: ClassVar[str] = "jensen_shannon"
    beta: float = 0.5  # Weight of the teacher in the mixture; 0: forward KL, 1: reverse KL

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "beta", ge=0, le=1)

    def mixture(self) -> KLMixture:
        beta = self.beta
        if beta in (0, 1):
            return self.make_mixture(1 - beta, 0.0, beta)
        return self.make_mixture(beta, beta, 1 - beta, 1 - beta)
