"""Rows of the engine's cache, and the passes that fill them."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tunekit.generation.requests import Answer

MAX_PASS_TOKENS = 16_384  # of one pass over prompts, with padding
MIN_PASS_TOKENS = 256  # smaller passes take as long as reading the weights, so padding is free
MAX_PADDING = 0.2  # fraction of padding in a larger pass with several rows
Moves = list[tuple[int, int]]  # rows to copy: from, to


class Passes(NamedTuple):
    """Answers whose tokens enter the cache: each pass has a batch of them; copies have the tokens of another answer."""

    batches: list[list[Answer]]
    copies: list[tuple[Answer, Answer]]  # original, copy

    @property
    def answers(self) -> list[Answer]:
        return [*(answer for batch in self.batches for answer in batch), *(copy for _, copy in self.copies)]


def plan_passes(answers: Sequence[Answer]) -> Passes:
    """Passes with little padding. Equal prompts are computed once; rows with a cache add their missing tokens."""
    fresh: dict[tuple[int, ...], list[Answer]] = {}
    for answer in answers:
        if answer.num_cached == 0:
            fresh.setdefault(tuple(answer.all_tokens), []).append(answer)
    extended = [answer for answer in answers if answer.num_cached > 0]
    copies = [(original, copy) for original, *others in fresh.values() for copy in others]
    return Passes([*split_batches([group[0] for group in fresh.values()]), *split_batches(extended)], copies)


def split_batches(answers: Sequence[Answer]) -> list[list[Answer]]:
    """Batches of answers that miss a similar number of tokens."""
    result: list[list[Answer]] = []
    total = 0
    for answer in sorted(answers, key=lambda answer: answer.num_missing):
        total += answer.num_missing
        padded = answer.num_missing * (len(result[-1]) + 1) if result else 0
        wasteful = padded > MIN_PASS_TOKENS and padded - total > MAX_PADDING * padded
        if not result or padded > MAX_PASS_TOKENS or wasteful:
            result.append([])
            total = answer.num_missing
        result[-1].append(answer)
    return result


def fill_region(region: range, answers: Iterable[Answer]) -> Moves:
    """Move answers into a region of as many slots; those inside stay. Returns the moves of those with a cache."""
    outside = [answer for answer in answers if answer.slot is None or answer.slot not in region]
    used = {answer.slot for answer in answers}
    moves = []
    for answer, slot in zip(outside, (slot for slot in region if slot not in used), strict=True):
        if answer.slot is not None and answer.num_cached > 0:
            moves.append((answer.slot, slot))
        answer.slot = slot
    return moves


def arrange_slots(
    num_slots: int, running: Sequence[Answer], admitted: Sequence[Answer], reserved: Sequence[Answer]
) -> Moves:
    """Assign slots: running answers in any order, then admitted ones in order, and reserved ones at the end."""
    moves = fill_region(range(len(running)), running)
    for slot, answer in enumerate(admitted, start=len(running)):
        moves += fill_region(range(slot, slot + 1), [answer])
    return moves + fill_region(range(num_slots - len(reserved), num_slots), reserved)
