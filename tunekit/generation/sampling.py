"""Sampling of the next tokens: a function of the logits, a uniform number for each row, and its earlier tokens.

Options have the names and the order of the logits processors of transformers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tunekit.errors import FieldError, check_range
from tunekit.kernels.prefix_sum import prefix_sum
from tunekit.models.weight_init import named_generator

MIN_TEMPERATURE = 1e-5  # logits that are divided by smaller ones overflow in fp32
MAX_PENALTY = 100.0  # and its inverse; far larger ones overflow


@dataclass(frozen=True)
class SamplingConfig:
    """Sampling options. The samples of a row depend on the seed and the name of the row, not on other rows."""

    temperature: float = 0.0  # Sampling temperature; 0: greedy decoding
    top_k: int | None = None  # Sample from the k most likely tokens; null, 0 or -1: all
    top_p: float = 1.0  # Sample from the most likely tokens with this total probability (nucleus sampling)
    # Sample from the tokens with at least this fraction of the highest probability (arXiv:2407.01082), such as 0.05
    min_p: float = 0.0
    # Divide positive and multiply negative logits of tokens that the prompt or the answer contains by this number
    # (arXiv:1909.05858); 1: no penalty
    repetition_penalty: float = 1.0
    stop_strings: tuple[str, ...] = ()  # Texts that end an answer, besides the stop tokens; not part of the answer
    max_new_tokens: int = 256  # Maximum length of an answer in tokens
    seed: int = 0  # Seed of the random numbers

    def __post_init__(self) -> None:
        check_range(self, "temperature", ge=0)
        if self.top_k is not None and self.top_k < -1:
            raise FieldError("top_k", f"must be >= 1, or 0 for all tokens, got {self.top_k}")
        check_range(self, "top_p", gt=0, le=1)
        check_range(self, "min_p", ge=0, le=1)
        check_range(self, "max_new_tokens", ge=1)
        check_range(self, "repetition_penalty", ge=1 / MAX_PENALTY, le=MAX_PENALTY)
        if "" in self.stop_strings:
            raise FieldError("stop_strings", "must not contain an empty text")

    @property
    def num_candidates(self) -> int | None:
        """Most likely tokens to sample from; None: all. transformers and vLLM write this as 0, vLLM also as -1."""
        return None if self.top_k in (None, 0, -1) else self.top_k

    def uniform_numbers(self, name: str, start: int, stop: int) -> Tensor:
        """Uniform random numbers start to stop of the row with this name, (stop - start,)."""
        return torch.rand(stop, generator=named_generator(self.seed, name))[start:]

    def sample(self, logits: Tensor, numbers: Tensor, seen: Tensor | None = None) -> Tensor:
        """Next tokens (B,) from logits (B, vocab) and a uniform number for each row (B,).

        `seen` (B, vocab) is a mask of the tokens of each row, for the repetition penalty.
        """
        if seen is not None:
            logits = logits.float()
            penalized = torch.where(logits < 0, logits * self.repetition_penalty, logits / self.repetition_penalty)
            logits = torch.where(seen, penalized, logits)
        return logits.argmax(-1) if self.temperature == 0 else self.sample_scaled(self.scale(logits), numbers)

    def scale(self, logits: Tensor) -> Tensor:
        """Logits divided by the temperature, in fp32."""
        return logits.float() if self.temperature in (0, 1) else logits.float() / max(self.temperature, MIN_TEMPERATURE)

    def sample_scaled(self, logits: Tensor, numbers: Tensor) -> Tensor:
        """Next tokens (B,) from logits (B, vocab) that are divided by the temperature, which is not 0."""
        weights, tokens = logits.softmax(-1), None
        if self.num_candidates is not None or self.top_p < 1:
            weights, tokens = self.sort_top_k(weights)
            preceding = prefix_sum(weights) - weights  # total probability of more likely tokens
            is_kept = preceding < self.top_p * weights.sum(-1, keepdim=True)
            is_kept[:, 0] = True  # also if the product underflows
            weights = weights * is_kept
        if self.min_p > 0:
            weights = weights * (weights >= self.min_p * weights.amax(-1, keepdim=True))
        index = sample_index(weights, numbers)
        return index if tokens is None else tokens.gather(-1, index[:, None]).squeeze(-1)

    def sort_top_k(self, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities and ids (B, top_k) in descending order; ties are sorted by id."""
        if self.num_candidates is None:
            return probabilities.sort(dim=-1, descending=True, stable=True)
        # The bits of positive floats are ordered like the floats. Appending the id makes all keys different, so that
        # topk has the same result on all devices.
        last = probabilities.shape[-1] - 1
        keys = (probabilities.view(torch.int32).long() << 32) + torch.arange(last, -1, -1, device=probabilities.device)
        tokens = last - (keys.topk(min(self.num_candidates, last + 1), dim=-1).values & 0xFFFFFFFF)
        return probabilities.gather(-1, tokens), tokens


CHAT_SAMPLING = SamplingConfig(0.7, top_p=0.95, max_new_tokens=1024)  # of answers in a conversation


def sample_index(weights: Tensor, numbers: Tensor) -> Tensor:
    """Sample an index (B,) from weights (B, N) with uniform numbers (B,). Indices of zero weights are never sampled.

    The index of weights with NaN is valid, but has no meaning.
    """
    sums = prefix_sum(weights)
    total = sums[:, -1:]
    threshold = torch.minimum(numbers.to(sums)[:, None] * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(sums, threshold, right=True).squeeze(-1).clamp(max=sums.shape[1] - 1)
