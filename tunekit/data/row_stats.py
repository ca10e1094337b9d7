"""What checks want to know of every document, by numpy in one pass: bounded memory however many rows there are."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from tunekit.data.preprocess.tokenized_dataset import TokenizedDataset
from tunekit.data.tokenizer import Tokenizer

BLOCK = 1 << 21  # tokens that are looked at together


@dataclass(frozen=True)
class RowStats:
    """An array of (documents,) each. Prints are equal where tokens are; they differ between processes."""

    targets: np.ndarray  # learnt tokens; a first one is none
    first_target: np.ndarray  # where the first learnt token stands; the length, if there is none
    all_targets: np.ndarray  # nothing is context
    complete_turns: np.ndarray  # learnt stretches that are there to their end; of what is learnt throughout, none
    turns_with_end: np.ndarray  # those of them whose last token is a special one
    last_token: np.ndarray  # the token that ends the last of them, or -1
    end_missing: np.ndarray  # the end is not there, and what is missing was to be learnt
    max_token: np.ndarray  # token
    num_unknown: np.ndarray  # tokens that stand for what the tokenizer cannot write
    first_token: np.ndarray  # the first token
    double_bos: np.ndarray  # the beginning-of-text token stands there twice
    token_hash: np.ndarray  # of all tokens
    prompt_hash: np.ndarray  # of those before the first learnt one
    answer_hash: np.ndarray  # of the learnt ones


@dataclass(frozen=True)
class StatsContext:
    """Tokens that checks look for, and the length at which rows are cut."""

    tokenizer: Tokenizer
    marks: np.ndarray
    bos: int
    unknown: int
    limit: int


def known(tokenizer: Tokenizer, limit: int) -> StatsContext:
    """`limit`: the most tokens that a row may have. Byte tokenizers name some other token as the unknown one."""
    bos = -1 if tokenizer.bos is None else tokenizer.bos
    unknown = tokenizer.special_token("unk_token")
    unknown = -1 if unknown is None or unknown == bos or unknown in tokenizer.stops else unknown
    return StatsContext(tokenizer, np.array(sorted(tokenizer.special_ids), np.int32), bos, unknown, limit)


def measure_rows(parts: Sequence[TokenizedDataset], tokenizer: Tokenizer, limit: int) -> RowStats:
    """All documents, none of which is empty."""
    wanted = known(tokenizer, limit)
    found = [block(part, wanted, *place) for part in parts for place in iter_blocks(part.bounds)]
    return RowStats(*(np.concatenate([vars(one)[field.name] for one in found]) for field in fields(RowStats)))


def iter_blocks(bounds: np.ndarray) -> Iterator[tuple[int, int]]:
    """First document of a block and the one behind its last."""
    first, count = 0, len(bounds) - 1
    while first < count:
        behind = int(np.searchsorted(bounds, bounds[first] + BLOCK, side="right")) - 1
        behind = min(max(behind, first + 1), count)
        yield first, behind
        first = behind


def block(documents: TokenizedDataset, wanted: StatsContext, first: int, behind: int) -> RowStats:
    bounds = np.asarray(documents.bounds[first : behind + 1])
    part = slice(bounds[0], bounds[-1])
    tokens, learnt = np.asarray(documents.tokens[part]), np.asarray(documents.learnt[part])
    starts, ends = bounds[:-1] - bounds[0], bounds[1:] - bounds[0]
    lengths = ends - starts
    counts = np.add.reduceat(learnt, starts, dtype=np.int64)
    short = (lengths < documents.whole[first:behind]) | (lengths == wanted.limit)
    stops, of = stretches(learnt, ends)
    last = final(tokens, stops, (stops > starts[of]) & learnt[stops - 1], wanted)
    well = np.isin(last, wanted.marks)
    broken = ~well & short[of] & (stops == ends[of] - 1)
    # The first token of a window that goes on with a row may be learnt in the one before: here it is no target.
    there = ~broken & (counts < lengths)[of] & (stops > starts[of])
    places, before = np.flatnonzero(learnt), np.cumsum(counts) - counts
    begins = np.where(counts > 0, np.append(places, 0)[before], ends)
    twice = (tokens[starts] == wanted.bos) & (tokens[np.minimum(starts + 1, ends - 1)] == wanted.bos)
    return RowStats(
        targets=counts - learnt[starts],
        first_target=begins - starts,
        all_targets=counts == lengths,
        complete_turns=np.bincount(of[there], minlength=len(starts)),
        turns_with_end=np.bincount(of[there & well], minlength=len(starts)),
        last_token=latest(last[there], of[there], len(starts)),
        end_missing=np.bincount(of[broken], minlength=len(starts)) > 0,
        max_token=np.maximum.reduceat(tokens, starts),
        num_unknown=np.add.reduceat(tokens == wanted.unknown, starts, dtype=np.int64),
        first_token=tokens[starts],
        double_bos=twice & (lengths > 1),
        token_hash=prints(tokens, starts, ends),
        prompt_hash=prints(tokens, starts, begins),
        answer_hash=prints(tokens[places], before, before + counts),
    )


def stretches(learnt: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where learnt stretches have their last token, and the document of each."""
    goes_on = np.append(learnt[1:], False)
    goes_on[ends - 1] = False
    stops = np.flatnonzero(learnt & ~goes_on)
    return stops, np.searchsorted(ends, stops, side="right")


def final(tokens: np.ndarray, stops: np.ndarray, more: np.ndarray, wanted: StatsContext) -> np.ndarray:
    """What each learnt stretch ends with; where a template writes white space behind the end, the token before it.

    `more`: whether the token before is learnt too.
    """
    last, before = tokens[stops], tokens[stops - 1]
    unclear = more & ~np.isin(last, wanted.marks) & np.isin(before, wanted.marks)
    blank = [token for token in np.unique(last[unclear]).tolist() if wanted.tokenizer.decode([token]).isspace()]
    return np.where(unclear & np.isin(last, blank), before, last)


def latest(tokens: np.ndarray, documents: np.ndarray, count: int) -> np.ndarray:
    """The last of the tokens of each document; -1 where there is none."""
    found = np.full(count, -1, np.int64)
    found[documents] = tokens  # of several for one place, the last stays
    return found


def prints(values: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """64 bits for each stretch: two stretches are taken for equal by mistake once in some billion times billion."""
    size, raw = values.itemsize, values.tobytes()
    places = zip((starts * size).tolist(), (ends * size).tolist(), strict=True)
    return np.fromiter((hash(raw[start:end]) for start, end in places), np.int64, len(starts))
