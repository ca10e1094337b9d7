"""Requests of the generation engine, and their tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tunekit.generation.sampling import SamplingConfig

FinishReason = Literal["stop", "length"]


def never_stop(answer: Sequence[int]) -> bool:
    """Stop condition that is never met."""
    return False


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt to answer. The samples depend on the seed and on `request_id`, not on other requests."""

    request_id: str  # unique among the unfinished requests; names the random numbers
    prompt: Sequence[int]
    sampling: SamplingConfig
    stop_token_ids: frozenset[int] = frozenset()  # end the answer and are its last token
    is_finished: Callable[[Sequence[int]], bool] = never_stop  # whether an answer ends, such as StopStrings.is_finished
    num_logprobs: int = 0  # number of most likely tokens to report with each sampled one
    keep_cache: bool = False  # keep the cache after the end, for `append_tokens`; `abort` frees it
    # Mask (vocab,) of the tokens that may follow an answer; None: all
    allowed_tokens: Callable[[Sequence[int]], Tensor | None] | None = None
    sample_name: str | None = None  # names the random numbers instead of `request_id`

    @property
    def random_name(self) -> str:
        """Name of the random numbers."""
        return self.sample_name or self.request_id


class TokenOutput(NamedTuple):
    """A sampled token. The stop token of an answer is one too."""

    request_id: str
    token: int
    logprob: float
    top_logprobs: list[tuple[int, float]]  # the most likely tokens, best first
    finish_reason: FinishReason | None  # None: more tokens follow


@lru_cache
def intern_options(options: SamplingConfig) -> SamplingConfig:
    """The first one of equal options, so that most comparisons need no hash."""
    return options


@dataclass(eq=False)
class Answer:
    """State of one answer of a request. `append_tokens` starts another answer of the same request."""

    request: GenerationRequest
    sampling: SamplingConfig
    context: list[int]  # tokens before the answer
    max_tokens: int  # limit on the length of the answer
    num_drawn: int = 0  # random numbers that earlier answers used
    tokens: list[int] = field(default_factory=list)  # of the answer
    num_launched: int = 0  # tokens of the answer that are computed or being computed
    num_cached: int = 0  # tokens in the cache, of launched steps too
    slot: int | None = None  # row in the cache
    is_finished: bool = False  # or aborted

    @property
    def all_tokens(self) -> list[int]:
        return self.context + self.tokens

    @property
    def num_missing(self) -> int:
        """Number of tokens that are not in the cache."""
        return len(self.context) + len(self.tokens) - self.num_cached

    @property
    def is_running(self) -> bool:
        """Whether another token must be computed."""
        return not self.is_finished and self.num_launched < self.max_tokens

    def drop_cache(self) -> None:
        """Give up the row in the cache: a later pass computes all tokens again."""
        self.slot, self.num_cached = None, 0

    @cached_property
    def options(self) -> SamplingConfig:
        """The options that change the distribution of tokens. Other options have default values."""
        return intern_options(replace(self.sampling, seed=0, max_new_tokens=1, stop_strings=()))

    @cached_property
    def numbers(self) -> Tensor:
        """Uniform random numbers (max_tokens,)."""
        if self.sampling.temperature == 0:
            return torch.zeros(self.max_tokens)
        return self.sampling.uniform_numbers(self.request.random_name, self.num_drawn, self.num_drawn + self.max_tokens)

    def add(self, token: int) -> FinishReason | None:
        """Add a sampled token. Returns why the answer ends, if it does."""
        self.tokens.append(token)
        reason: FinishReason | None = None
        if token in self.request.stop_token_ids or self.request.is_finished(self.tokens):
            reason = "stop"
        elif len(self.tokens) == self.max_tokens:
            reason = "length"
        self.is_finished = reason is not None
        return reason
