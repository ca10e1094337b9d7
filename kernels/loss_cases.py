"""Example calls of the kernels of losses and of the optimizer."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tunekit.kernels import adamw8bit, cross_entropy, kl_divergence
from tunekit.kernels.adamw8bit import BLOCK, AdamWHyperparams, Moments
from tunekit.kernels.cross_entropy import CrossEntropyTerms, linear_cross_entropy, token_losses
from tunekit.kernels.kernel_case import DTYPES, FP32, KernelCase, compiled_kernel
from tunekit.kernels.kl_divergence import FullTargets, KLMixture

TOKENS, DIM, VOCAB = 70, 64, 1031
TERMS = {
    "plain": CrossEntropyTerms(),
    "label smoothing": CrossEntropyTerms(smoothing=0.1),
    "z-loss": CrossEntropyTerms(z_loss=0.01),
    "scale": CrossEntropyTerms(scale=0.4),
    "softcap": CrossEntropyTerms(softcap=3.0),
    "all terms": CrossEntropyTerms(scale=2.5, softcap=7.0, smoothing=0.2, z_loss=0.1),
}
MIXTURES = {
    "forward": KLMixture(),
    "reverse": KLMixture(0.0, reverse=1.0),
    "both": KLMixture(1.0, reverse=1.0),
    "skewed": KLMixture(forward_skew=0.1),
    "skewed reverse": KLMixture(0.0, reverse=1.0, reverse_skew=0.1),
    "between": KLMixture(0.3, 0.3, 0.7, 0.7),
    "warm": KLMixture(temperature=2.5),
    "between, warm": KLMixture(0.5, 0.5, 0.5, 0.5, temperature=1.7),
}


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


def cross_entropy_cases(device: torch.device) -> Iterator[KernelCase]:
    for (name, terms), (label, dtype) in product(TERMS.items(), DTYPES.items()):
        targets = torch.randint(VOCAB, (TOKENS,))
        targets[::7] = -100
        inputs = {"logits": (3 * torch.randn(TOKENS, VOCAB)).to(dtype), "targets": targets}
        inputs |= {"weights": torch.rand(TOKENS) - 0.3}
        function, reference = partial(losses_and_gradients, terms), partial(losses_and_gradients_reference, terms)
        yield KernelCase(f"{name} {label}", function, reference, inputs, has_gradients=False)
    for (name, terms), (label, dtype) in product(TERMS.items(), DTYPES.items()):
        inputs = {"hidden": torch.randn(TOKENS, DIM).to(dtype), "weight": torch.randn(VOCAB, DIM).to(dtype) * 0.1}
        inputs |= {"targets": torch.randint(VOCAB, (TOKENS,))}
        function, reference = partial(head_loss, terms), partial(head_loss_reference, terms)
        yield KernelCase(f"head and loss in chunks, {name} {label}", function, reference, inputs)


def losses_and_gradients(
    terms: CrossEntropyTerms, logits: Tensor, targets: Tensor, weights: Tensor
) -> tuple[Tensor, ...]:
    """Losses, gradients that replace the logits, and entropies."""
    numbers = [terms.scale, terms.softcap or 0.0, terms.smoothing, terms.z_loss]
    entropies = cross_entropy.token_entropies(logits, terms.scale, terms.softcap)
    return token_losses(logits, targets, weights, numbers, True), logits, entropies


@torch.enable_grad()
def losses_and_gradients_reference(
    terms: CrossEntropyTerms, raw: Tensor, targets: Tensor, weights: Tensor
) -> tuple[Tensor, ...]:
    logits = finish_logits(raw.requires_grad_(), terms.scale, terms.softcap)
    losses = token_loss_definition(terms, logits, targets.clamp(min=0)) * (targets >= 0)
    (gradient,) = torch.autograd.grad((losses * weights).sum(), raw)
    return losses, gradient, torch.special.entr(logits.detach().softmax(-1)).sum(-1)


def finish_logits(raw: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Scaled and capped logits in fp64."""
    x = raw.double() * scale
    return x if softcap is None else (x / softcap).tanh() * softcap


def token_loss_definition(terms: CrossEntropyTerms, logits: Tensor, targets: Tensor) -> Tensor:
    """Loss of each token by definition, in fp64, from scaled and capped logits."""
    logps = logits.double().log_softmax(-1)
    target_logps = logps.gather(-1, targets[:, None]).squeeze(1)
    smoothed = (1 - terms.smoothing) * target_logps + terms.smoothing * logps.mean(-1)
    return terms.z_loss * logits.double().logsumexp(-1).square() - smoothed


def head_loss(terms: CrossEntropyTerms, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, targets, PlainHead(weight, terms.scale, terms.softcap), terms)


def head_loss_reference(terms: CrossEntropyTerms, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return token_loss_definition(terms, finish_logits(hidden @ weight.T, terms.scale, terms.softcap), targets).sum()


def kl_divergence_cases(device: torch.device) -> Iterator[KernelCase]:
    for (name, mixture), (label, dtype) in product(MIXTURES.items(), DTYPES.items()):
        teacher = torch.randn(TOKENS, DIM).to(dtype), torch.randn(VOCAB, DIM).to(dtype) * 0.2
        inputs = {"hidden": torch.randn(TOKENS, DIM).to(dtype), "weight": torch.randn(VOCAB, DIM).to(dtype) * 0.2}
        on_device = teacher[0].to(device), teacher[1].to(device)
        function = partial(head_divergence, teacher=on_device, mixture=mixture)
        reference = partial(head_divergence_reference, teacher=teacher, mixture=mixture)
        yield KernelCase(f"{name} {label}", function, reference, inputs)


def head_divergence(hidden: Tensor, weight: Tensor, teacher: tuple[Tensor, Tensor], mixture: KLMixture) -> Tensor:
    expected = FullTargets(teacher[0], PlainHead(teacher[1]))
    targets = torch.zeros(len(hidden), dtype=torch.long, device=hidden.device)
    return kl_divergence.linear_kl_divergence(hidden, targets, PlainHead(weight), expected, mixture)[0]


def head_divergence_reference(
    hidden: Tensor, weight: Tensor, teacher: tuple[Tensor, Tensor], mixture: KLMixture
) -> Tensor:
    logits = hidden @ weight.T, teacher[0].double() @ teacher[1].double().T
    p, q = ((x / mixture.temperature).softmax(-1) for x in logits)
    return kl_definition(p, q, mixture).sum()


def kl_definition(p: Tensor, q: Tensor, mixture: KLMixture) -> Tensor:
    """KL divergence of each token, from probabilities (n, V)."""
    m = mixture.forward_skew * q + (1 - mixture.forward_skew) * p
    n = mixture.reverse_skew * p + (1 - mixture.reverse_skew) * q
    forward, reverse = torch.xlogy(q, q) - torch.xlogy(q, m), torch.xlogy(p, p) - torch.xlogy(p, n)
    return (mixture.forward * forward + mixture.reverse * reverse).sum(-1)


def adamw8bit_cases(device: torch.device) -> Iterator[KernelCase]:
    """Codes and weights of three steps."""
    for count, (label, dtype) in product((70_001, 300, 1), DTYPES.items()):
        gradients = torch.randn(3, count) * (2 * torch.randn(3, count)).exp()
        inputs = {"weight": torch.randn(count).to(dtype), "gradients": gradients.to(dtype)}
        for name, outputs, limit in (("moments", slice(3), None), ("weights", slice(3, 4), 1e-3)):
            function, reference = (
                partial(take_steps, step, dtype, outputs)
                for step in (adamw8bit.adamw8bit_step, adamw8bit.step_reference)
            )
            limit = limit if dtype == FP32 else None
            yield KernelCase(f"{name}, {count} in {label}", function, reference, inputs, False, limit, max_code_step=1)


def take_steps(step: Any, dtype: torch.dtype, outputs: slice, weight: Tensor, gradients: Tensor) -> tuple[Tensor, ...]:
    """Codes of both moments, scales and weights, which each step rounds to `dtype`."""
    weight, gradients = weight.to(dtype), gradients.to(dtype)
    first, second = (torch.zeros(len(weight), dtype=torch.uint8, device=weight.device) for _ in range(2))
    moments = Moments(first, second, torch.zeros(2, -(-len(weight) // BLOCK), device=weight.device))
    for number, gradient in enumerate(gradients, 1):
        step(weight, gradient, moments, AdamWHyperparams(1e-2, 0.1, (0.9, 0.95), 1e-8, number))
    return (moments.first, moments.second, moments.scales, weight)[outputs]


KERNELS = (
    compiled_kernel("cross_entropy", cross_entropy_cases, cross_entropy),
    compiled_kernel("kl_divergence", kl_divergence_cases, kl_divergence),
    compiled_kernel("adamw8bit", adamw8bit_cases, adamw8bit),
)
