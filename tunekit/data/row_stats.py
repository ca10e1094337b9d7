"""Statistics of each document for the data checks, computed by numpy in blocks of bounded memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tunekit.data.preprocess.tokenized_dataset import TokenizedDataset
from tunekit.data.tokenizer import Tokenizer

BLOCK_TOKENS = 1 << 21  # tokens that are processed at a time


class RowStats(NamedTuple):
    """Arrays of (documents,). A turn is a span of adjacent target tokens; documents without a prompt have none.

    Hashes are 64 bits. They are equal for equal tokens, within one process.
    """

    targets: np.ndarray  # number of target tokens, without the first token
    first_target: np.ndarray  # position of the first target token; the length if there is none
    all_targets: np.ndarray  # whether all tokens are target tokens
    complete_turns: np.ndarray  # turns whose end is not truncated
    turns_with_end: np.ndarray  # complete turns whose last token is a special token
    last_token: np.ndarray  # last token of the last complete turn, or -1
    end_missing: np.ndarray  # whether a turn is truncated before its end
    max_token: np.ndarray  # highest token id
    num_unknown: np.ndarray  # number of unknown tokens
    first_token: np.ndarray  # first token id
    double_bos: np.ndarray  # whether the document starts with two BOS tokens
    token_hash: np.ndarray  # of all tokens
    prompt_hash: np.ndarray  # of the tokens before the first target
    answer_hash: np.ndarray  # of the target tokens


@dataclass(frozen=True)
class StatsContext:
    """Token ids that the statistics depend on, and the length to which rows are truncated."""

    tokenizer: Tokenizer
    special_ids: np.ndarray
    bos: int
    unknown: int
    max_length: int


def make_context(tokenizer: Tokenizer, max_length: int) -> StatsContext:
    """Context of a tokenizer. Byte-level tokenizers declare another special token as the unknown token."""
    bos = -1 if tokenizer.bos is None else tokenizer.bos
    unknown = tokenizer.special_token("unk_token")
    unknown = -1 if unknown is None or unknown == bos or unknown in tokenizer.stops else unknown
    return StatsContext(tokenizer, np.array(sorted(tokenizer.special_ids), np.int32), bos, unknown, max_length)


def measure_rows(datasets: Sequence[TokenizedDataset], tokenizer: Tokenizer, max_length: int) -> RowStats:
    """Statistics of all documents of some datasets. No document may be empty."""
    context = make_context(tokenizer, max_length)
    blocks = [measure_block(dataset, context, *block) for dataset in datasets for block in iter_blocks(dataset.bounds)]
    return RowStats(*map(np.concatenate, zip(*blocks, strict=True)))


def iter_blocks(bounds: np.ndarray) -> Iterator[tuple[int, int]]:
    """First document of each block, and the document after its last."""
    start, count = 0, len(bounds) - 1
    while start < count:
        end = int(np.searchsorted(bounds, bounds[start] + BLOCK_TOKENS, side="right")) - 1
        end = min(max(end, start + 1), count)
        yield start, end
        start = end


def measure_block(dataset: TokenizedDataset, context: StatsContext, start: int, end: int) -> RowStats:
    """Statistics of the documents from `start` to before `end`."""
    bounds = np.asarray(dataset.bounds[start : end + 1])
    span = slice(bounds[0], bounds[-1])
    tokens, loss_mask = np.asarray(dataset.tokens[span]), np.asarray(dataset.loss_mask[span])
    starts, ends = bounds[:-1] - bounds[0], bounds[1:] - bounds[0]
    lengths = ends - starts
    counts = np.add.reduceat(loss_mask, starts, dtype=np.int64)
    is_truncated = (lengths < dataset.full_lengths[start:end]) | (lengths == context.max_length)
    turn_ends, documents = find_turn_ends(loss_mask, ends)
    previous_is_target = (turn_ends > starts[documents]) & loss_mask[turn_ends - 1]
    last_tokens = last_turn_tokens(tokens, turn_ends, previous_is_target, context)
    has_end = np.isin(last_tokens, context.special_ids)
    is_cut = ~has_end & is_truncated[documents] & (turn_ends == ends[documents] - 1)
    # The first token of a window of a split row may be a target of the previous window; in this one it is not.
    is_complete = ~is_cut & (counts < lengths)[documents] & (turn_ends > starts[documents])
    target_indices, first_counts = np.flatnonzero(loss_mask), np.cumsum(counts) - counts
    first_targets = np.where(counts > 0, np.append(target_indices, 0)[first_counts], ends)
    double_bos = (tokens[starts] == context.bos) & (tokens[np.minimum(starts + 1, ends - 1)] == context.bos)
    return RowStats(
        targets=counts - loss_mask[starts],
        first_target=first_targets - starts,
        all_targets=counts == lengths,
        complete_turns=np.bincount(documents[is_complete], minlength=len(starts)),
        turns_with_end=np.bincount(documents[is_complete & has_end], minlength=len(starts)),
        last_token=last_of_each(last_tokens[is_complete], documents[is_complete], len(starts)),
        end_missing=np.bincount(documents[is_cut], minlength=len(starts)) > 0,
        max_token=np.maximum.reduceat(tokens, starts),
        num_unknown=np.add.reduceat(tokens == context.unknown, starts, dtype=np.int64),
        first_token=tokens[starts],
        double_bos=double_bos & (lengths > 1),
        token_hash=hash_spans(tokens, starts, ends),
        prompt_hash=hash_spans(tokens, starts, first_targets),
        answer_hash=hash_spans(tokens[target_indices], first_counts, first_counts + counts),
    )


def find_turn_ends(loss_mask: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Index of the last token of each turn, and the document of each turn."""
    next_is_target = np.append(loss_mask[1:], False)
    next_is_target[ends - 1] = False
    turn_ends = np.flatnonzero(loss_mask & ~next_is_target)
    return turn_ends, np.searchsorted(ends, turn_ends, side="right")


def last_turn_tokens(
    tokens: np.ndarray, turn_ends: np.ndarray, previous_is_target: np.ndarray, context: StatsContext
) -> np.ndarray:
    """Last token of each turn; if the template writes whitespace after the end token, the end token.

    `previous_is_target`: whether the token before the last one belongs to the turn.
    """
    last, previous = tokens[turn_ends], tokens[turn_ends - 1]
    is_candidate = previous_is_target & ~np.isin(last, context.special_ids) & np.isin(previous, context.special_ids)
    candidates = np.unique(last[is_candidate]).tolist()
    whitespace = [token for token in candidates if context.tokenizer.decode([token]).isspace()]
    return np.where(is_candidate & np.isin(last, whitespace), previous, last)


def last_of_each(tokens: np.ndarray, documents: np.ndarray, num_documents: int) -> np.ndarray:
    """Last token of each document; -1 for documents without one."""
    last = np.full(num_documents, -1, np.int64)
    last[documents] = tokens  # of repeated indices, the last assignment counts
    return last


def hash_spans(values: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """64-bit hash of each span of values."""
    size, content = values.itemsize, values.tobytes()
    spans = zip((starts * size).tolist(), (ends * size).tolist(), strict=True)
    return np.fromiter((hash(content[start:end]) for start, end in spans), np.int64, len(starts))
