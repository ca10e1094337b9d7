"""Kernels of the loss and the optimizer."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.kernels import adamw8bit, cross_entropy, kl_divergence
from tunekit.kernels.adamw8bit import BLOCK, AdamWHyperparams, Moments
from tunekit.kernels.cross_entropy import CrossEntropyTerms, linear_cross_entropy, token_losses, token_losses_reference
from tunekit.kernels.kl_divergence import FullTargets, KLMixture
from tunekit.selftest.compare import BF16, DTYPE_NAMES, Comparison, require_fast_version, require_triton_launches
from tunekit.selftest.context import Context
from tunekit.selftest.result import CheckFailedError, Result

TOKENS, DIM, VOCAB = 70, 64, 1031
# Scale, softcap, label smoothing and weight of the z-loss.
TERMS = {"plain": [1.0, 0.0, 0.0, 0.0], "gemma": [0.7, 30.0, 0.0, 0.0], "smoothed": [1.0, 0.0, 0.1, 1e-3]}
MIXTURES = {
    "forward": KLMixture(),
    "reverse": KLMixture(0.0, reverse=1.0),
    "skewed": KLMixture(0.5, 0.5, 0.5, 0.5, 1.7),
}


def check_cross_entropy(context: Context) -> Result:
    comparison = Comparison(context, require_fast_version(context, cross_entropy))
    with require_triton_launches(context):
        for (name, terms), (dtype, label) in product(TERMS.items(), DTYPE_NAMES.items()):
            check_token_losses(comparison, f"{name} {label}", terms, dtype)
        for dtype, label in DTYPE_NAMES.items():
            inputs = {"hidden": torch.randn(TOKENS, DIM).to(dtype), "weight": torch.randn(VOCAB, DIM).to(dtype) * 0.1}
            targets = torch.randint(VOCAB, (TOKENS,))
            fast = partial(head_loss, targets=targets.to(context.device))
            reference = partial(head_loss_reference, targets=targets)
            comparison.check_function(f"head and loss in chunks, {label}", fast, reference, inputs)
    return comparison.result()


def check_token_losses(comparison: Comparison, name: str, terms: list[float], dtype: torch.dtype) -> None:
    """Losses, gradients that replace the logits, and entropies."""
    logits, targets, weights = 3 * torch.randn(TOKENS, VOCAB), torch.randint(VOCAB, (TOKENS,)), torch.rand(TOKENS)
    targets[::7] = -100
    logits = logits.to(dtype)
    actual, expected = logits.to(comparison.device, copy=True), logits.float()
    entropies = cross_entropy.token_entropies(actual, terms[0], terms[1] or None)
    comparison.check(
        f"{name}, entropies", entropies, cross_entropy.token_entropies_reference(expected, terms), dtype=BF16
    )
    on_device = targets.to(comparison.device), weights.to(comparison.device)
    losses = token_losses(actual, *on_device, terms, True)
    comparison.check(f"{name}, losses", losses, token_losses_reference(expected, targets, weights, terms, True))
    comparison.check(f"{name}, gradient of the logits", actual, expected)


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, targets, PlainHead(weight), CrossEntropyTerms())


def head_loss_reference(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ weight.T, targets, reduction="sum")


@dataclass(frozen=True, eq=False)
class PlainHead:
    """The last layer of a model: a matrix that autograd follows, which may be a part of no module."""

    weight: Tensor
    scale: float = 1.0
    softcap: float | None = None
    vocab_shard: None = None
    is_plain_linear: bool = True

    def raw_logits(self, x: Tensor) -> Tensor:
        return x @ self.weight.T

    def parameters(self) -> Iterator[Any]:
        yield self.weight


def check_kl_divergence(context: Context) -> Result:
    comparison = Comparison(context, require_fast_version(context, kl_divergence))
    with require_triton_launches(context):
        for (name, mixture), (dtype, label) in product(MIXTURES.items(), DTYPE_NAMES.items()):
            teacher = torch.randn(TOKENS, DIM).to(dtype), torch.randn(VOCAB, DIM).to(dtype) * 0.2
            inputs = {"hidden": torch.randn(TOKENS, DIM).to(dtype), "weight": torch.randn(VOCAB, DIM).to(dtype) * 0.2}
            moved = teacher[0].to(context.device), teacher[1].to(context.device)
            fast = partial(divergence_from, teacher=moved, mixture=mixture)
            reference = partial(divergence_reference, teacher=teacher, mixture=mixture)
            comparison.check_function(f"{name} {label}", fast, reference, inputs)
    return comparison.result()


def divergence_from(hidden: Tensor, weight: Tensor, teacher: tuple[Tensor, Tensor], mixture: KLMixture) -> Tensor:
    expected = FullTargets(teacher[0], PlainHead(teacher[1]))
    targets = torch.zeros(len(hidden), dtype=torch.long, device=hidden.device)
    return kl_divergence.linear_kl_divergence(hidden, targets, PlainHead(weight), expected, mixture)[0]


def divergence_reference(hidden: Tensor, weight: Tensor, teacher: tuple[Tensor, Tensor], mixture: KLMixture) -> Tensor:
    """KL divergences of the mixture's definition, in fp64."""
    student = (hidden.double() @ weight.double().T / mixture.temperature).log_softmax(-1)
    target = (teacher[0].double() @ teacher[1].double().T / mixture.temperature).log_softmax(-1)
    p, q = student.exp(), target.exp()
    forward = mixture.forward_skew * q + (1 - mixture.forward_skew) * p
    reverse = mixture.reverse_skew * p + (1 - mixture.reverse_skew) * q
    terms = mixture.forward * q * (target - forward.log()) + mixture.reverse * p * (student - reverse.log())
    return terms.sum().float()


def check_adamw8bit(context: Context) -> Result:
    """Codes and weights of three steps."""
    comparison = Comparison(context, require_fast_version(context, adamw8bit))
    with require_triton_launches(context):
        for count, (dtype, label) in product((70_000, 300), DTYPE_NAMES.items()):
            check_optimizer_steps(comparison, f"{count} weights in {label}", count, dtype)
    return comparison.result()


def check_optimizer_steps(comparison: Comparison, name: str, count: int, dtype: torch.dtype) -> None:
    device = comparison.device
    expected, expected_moments = torch.randn(count).to(dtype), zero_moments(count, torch.device("cpu"))
    actual, moments = expected.to(device, copy=True), zero_moments(count, device)
    for step in range(1, 4):
        rule = AdamWHyperparams(1e-2, 0.1, (0.9, 0.95), 1e-8, step)
        gradient = (torch.randn(count) * (2 * torch.randn(count)).exp()).to(dtype)
        adamw8bit.adamw8bit_step(actual, gradient.to(device), moments, rule)
        adamw8bit.step_reference(expected, gradient, expected_moments, rule)
    for code, a, b in (
        ("first moment", moments.first, expected_moments.first),
        ("second moment", moments.second, expected_moments.second),
    ):
        difference = (a.cpu().int() - b.int()).abs()
        if int(difference.max()) > 1:  # rounding may choose the neighbor
            raise CheckFailedError(f"{name}, {code}: codes differ by {int(difference.max())} steps")
        comparison.check_equal(f"{name}, {code}", a, b, max_fraction=1e-3)
    comparison.check(f"{name}, scales", moments.scales, expected_moments.scales)
    comparison.check(f"{name}, weights", actual, expected, dtype=BF16)


def zero_moments(count: int, device: torch.device) -> Moments:
    first, second = (torch.zeros(count, dtype=torch.uint8, device=device) for _ in range(2))
    return Moments(first, second, torch.zeros(2, -(-count // BLOCK), device=device))
