"""How far a student is from its teacher, over learnt tokens. As with all losses, these are sums.

p is what the student expects, q what the teacher does, both of logits over a temperature.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tunekit.data.dataloader.batch import Batch
from tunekit.errors import FieldError
from tunekit.kernels.kl_divergence import FIGURES, KLMixture, TeacherTargets, linear_kl_divergence
from tunekit.losses.cross_entropy import local_targets
from tunekit.models.decoder import Decoder, Head

Figures = dict[str, Tensor]
Compare = Callable[[Decoder, Batch], tuple[Tensor, Figures]]


@dataclass(frozen=True)
class KLDivergenceLoss:
    """What all of them can be told."""

    temperature: float = 1.0  # of both; the loss is not multiplied by its square
    # Weight of the distillation loss; the rest is cross-entropy on the data. kd_ratio = 1 - truth
    kd_ratio: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise FieldError("temperature", f"must be above 0, not {self.temperature}")
        if not 0 < self.kd_ratio <= 1:
            raise FieldError(
                "kd_ratio", f"must be above 0 and at most 1, got {self.kd_ratio}. For 0, use the recipe sft"
            )

    def __call__(self, model: Decoder, batch: Batch, teacher: TeacherTargets) -> tuple[Tensor, Figures]:
        """The loss and other figures, summed over the learnt tokens of a batch."""
        targets, rows = local_targets(model, batch)
        found: list[Tensor] = []

        def read(hidden: Tensor, head: Head) -> Tensor:
            loss, figures = linear_kl_divergence(hidden.flatten(0, 1), targets, head, teacher, self.made(), rows)
            found.append(figures)
            return loss

        loss = model(batch.tokens, batch.positions, batch.layout, read=read, part=True)
        return loss, dict(zip(FIGURES, found[0].unbind(), strict=True))

    def made(self) -> KLMixture:
        return self.mixture(1.0)

    def mixture(self, *parts: float) -> KLMixture:
        """Weights and skews of KL(q || p) and KL(p || q)."""
        return KLMixture(*parts, temperature=self.temperature, truth=1.0 - self.kd_ratio)


@dataclass(frozen=True)
class ForwardKL(KLDivergenceLoss):
    """KL(q || p): the student is to expect all that the teacher does (arXiv:1503.02531)."""

    kind: ClassVar[str] = "forward_kl"


@dataclass(frozen=True)
class ReverseKL(KLDivergenceLoss):
    """KL(p || q): the student is to expect nothing that the teacher does not (arXiv:2306.08543)."""

    kind: ClassVar[str] = "reverse_kl"

    def made(self) -> KLMixture:
        return self.mixture(0.0, 0.0, 1.0)


@dataclass(frozen=True)
class SymmetricKL(KLDivergenceLoss):
    """KL(q || p) + KL(p || q), which is Jeffreys' divergence."""

    kind: ClassVar[str] = "symmetric_kl"

    def made(self) -> KLMixture:
        return self.mixture(1.0, 0.0, 1.0)


@dataclass(frozen=True)
class SkewedBase(KLDivergenceLoss):
    """One side is compared with a mixture of both."""

    alpha: float = 0.1  # share of the one side in the mixture

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.alpha < 1:
            raise FieldError("alpha", f"a share between 0 and 1, not {self.alpha}")


@dataclass(frozen=True)
class SkewedKL(SkewedBase):
    """KL(q || α q + (1 - α) p) of DistiLLM (arXiv:2402.03898)."""

    kind: ClassVar[str] = "skewed_kl"

    def made(self) -> KLMixture:
        return self.mixture(1.0, self.alpha)


@dataclass(frozen=True)
class SkewedReverseKL(SkewedBase):
    """KL(p || α p + (1 - α) q) of DistiLLM (arXiv:2402.03898)."""

    kind: ClassVar[str] = "skewed_reverse_kl"

    def made(self) -> KLMixture:
        return self.mixture(0.0, 0.0, 1.0, self.alpha)


@dataclass(frozen=True)
class JensenShannon(KLDivergenceLoss):
    """β KL(q || m) + (1 - β) KL(p || m) with m = β q + (1 - β) p, of GKD (arXiv:2306.13649).

    At the ends, where it is zero, it stands for what it comes near: 0 for KL(q || p), 1 for KL(p || q).
    """

    kind: ClassVar[str] = "jensen_shannon"
    beta: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.beta <= 1:
            raise FieldError("beta", f"a share from 0 to 1, not {self.beta}")

    def made(self) -> KLMixture:
        beta = self.beta
        if beta in (0, 1):
            return self.mixture(1 - beta, 0.0, beta)
        return self.mixture(beta, beta, 1 - beta, 1 - beta)
