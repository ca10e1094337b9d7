"""Device state of the rows that are generated, and the draw of their next tokens with log-probabilities."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tunekit.generation.requests import Answer
from tunekit.generation.sampling import SamplingConfig
from tunekit.kernels.device_tensors import copy_to_device

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]


class SamplingGroup(NamedTuple):
    """Rows of a batch with equal sampling options."""

    sampling: SamplingConfig
    rows: Tensor | None  # (N,) indices; None: all rows


def group_rows(answers: Sequence[Answer], num_rows: int, device: torch.device) -> list[SamplingGroup]:
    """Groups of rows with equal options. Rows after those of the answers get the options of the first one."""
    options = answers[0].options
    if all(answer.options is options for answer in answers):  # hashing those of 64 rows takes 0.1 ms
        return [SamplingGroup(options, None)]
    rows: dict[SamplingConfig, list[int]] = {}
    for row, answer in enumerate(answers):
        rows.setdefault(answer.options, []).append(row)
    first, *others = rows
    if not others:
        return [SamplingGroup(first, None)]
    rows[first] += range(len(answers), num_rows)
    return [SamplingGroup(key, copy_to_device(torch.tensor(index), device)) for key, index in rows.items()]


class RowState:
    """Tensors of all slots with fixed addresses, which a step reads and updates in place.

    Last tokens and their positions, (M, 1); random numbers, (M, N), and the index of the next one, (M, 1).
    """

    def __init__(self, num_slots: int, max_tokens: int, vocab: int, device: torch.device) -> None:
        self.device, self.vocab = device, vocab
        self.tokens, self.positions, self.drawn = (
            torch.zeros(num_slots, 1, dtype=torch.long, device=device) for _ in range(3)
        )
        self.numbers = torch.zeros(num_slots, max_tokens, device=device)
        self.seen: Tensor | None = None  # (M, vocab) tokens of the rows, once an option reads them

    def copy_rows(self, source: Tensor, target: Tensor) -> None:
        """Copy rows `source` (N,) to rows `target` (N,)."""
        for x in (self.tokens, self.positions, self.drawn, self.numbers, self.seen):
            if x is not None:
                x[target] = x[source]

    def clear_rows(self, start: int, stop: int) -> None:
        """Let rows without an answer stay at position 0: they would leave the cache after many steps."""
        if start < stop:
            self.positions[start:stop].zero_()
            self.drawn[start:stop].zero_()

    def set_rows(self, start: int, answers: Sequence[Answer]) -> None:
        """State of consecutive rows whose tokens are all in the cache."""
        counts = torch.tensor([[len(answer.all_tokens) - 1, answer.num_launched] for answer in answers])
        rows = slice(start, start + len(answers))
        self.positions[rows], self.drawn[rows] = copy_to_device(counts, self.device).split(1, dim=1)
        if any(answer.sampling.temperature > 0 for answer in answers):
            numbers = torch.nn.utils.rnn.pad_sequence([answer.numbers for answer in answers], batch_first=True)
            self.numbers[rows, : numbers.shape[1]] = copy_to_device(numbers, self.device)
        if any(answer.sampling.repetition_penalty != 1 for answer in answers):
            self.set_seen(rows, answers)

    def set_seen(self, rows: slice, answers: Sequence[Answer]) -> None:
        seen = torch.zeros(len(answers), self.vocab, dtype=torch.bool)
        for row, answer in zip(seen, answers, strict=True):
            row[torch.tensor(answer.all_tokens)] = True
        if self.seen is None:
            self.seen = torch.zeros(len(self.tokens), self.vocab, dtype=torch.bool, device=self.device)
        self.seen[rows] = copy_to_device(seen, self.device)


def allowed_tokens(answers: Sequence[Answer], num_rows: int, state: RowState) -> Tensor | None:
    """Mask (num_rows, vocab) of the tokens that may follow answers; None: all tokens may follow each of them."""
    if not any(answer.request.allowed_tokens for answer in answers):
        return None
    mask = torch.ones(num_rows, state.vocab, dtype=torch.bool)
    for row, answer in zip(mask, answers, strict=False):
        allowed = answer.request.allowed_tokens and answer.request.allowed_tokens(answer.tokens)
        if allowed is not None:
            row.zero_()[: len(allowed)] = allowed.bool()
    return copy_to_device(mask, state.device)


class TokenDraw:
    """Draws the next tokens of rows start to stop and their log-probabilities."""

    def __init__(self, state: RowState, mode: LogprobsMode) -> None:
        self.state, self.mode = state, mode

    def __call__(
        self,
        logits: Tensor,
        start: int,
        groups: Sequence[SamplingGroup],
        num_logprobs: int,
        allowed: Tensor | None = None,
    ) -> Tensor:
        """Outputs (B, 2 + 2 * num_logprobs) in fp32 from logits (B, vocab): the token, its log-probability, the most
        likely tokens, and their log-probabilities. fp32 represents ids up to 2^24.

        `allowed` (B, vocab) restricts the tokens, but does not change log-probabilities.
        """
        state, rows = self.state, slice(start, start + len(logits))
        numbers = state.numbers[rows].gather(1, state.drawn[rows])[:, 0]
        masks = None if state.seen is None else state.seen[rows], allowed
        if len(groups) == 1:
            output = self.draw_group(groups[0].sampling, num_logprobs, logits, numbers, *masks)
        else:
            output = torch.zeros(len(logits), 2 + 2 * num_logprobs, device=logits.device)
            for sampling, index in groups:
                selected = (None if mask is None else mask[index] for mask in masks)
                output[index] = self.draw_group(sampling, num_logprobs, logits[index], numbers[index], *selected)
        tokens = output[:, :1].long()
        state.tokens[rows] = tokens
        if state.seen is not None:
            state.seen[rows].scatter_(1, tokens, True)
        state.positions[rows].add_(1)
        state.drawn[rows].add_(1)
        return output

    def draw_group(  # noqa: PLR0913
        self,
        sampling: SamplingConfig,
        num_logprobs: int,
        logits: Tensor,
        numbers: Tensor,
        seen: Tensor | None,
        allowed: Tensor | None,
    ) -> Tensor:
        """Outputs of rows with equal options."""
        scaled = sampling.scale(logits)
        unscaled = self.mode == "raw_logprobs" and sampling.temperature not in (0, 1)
        reported = logits.float() if unscaled else scaled
        total = reported.logsumexp(-1, keepdim=True)
        if sampling.temperature > 0 and sampling.repetition_penalty == 1 and allowed is None:
            tokens = sampling.sample_scaled(scaled, numbers)[:, None]  # without another copy of the logits
        else:
            masked = logits if allowed is None else logits.masked_fill(~allowed, float("-inf"))
            tokens = sampling.sample(masked, numbers, None if sampling.repetition_penalty == 1 else seen)[:, None]
        output = [tokens, reported.gather(1, tokens) - total]
        if num_logprobs:
            top = reported.topk(num_logprobs, dim=-1)
            output += [top.indices, top.values - total]
        return torch.cat([x.float() for x in output], dim=1)


def read_output(output: list[float], num_logprobs: int) -> tuple[int, float, list[tuple[int, float]]]:
    """Token, log-probability and the most likely tokens of one row, of which it requests `num_logprobs`."""
    token, logprob, *top = output
    if not num_logprobs:
        return int(token), logprob, []
    half = len(top) // 2
    return int(token), logprob, [(int(top[i]), top[half + i]) for i in range(num_logprobs)]
