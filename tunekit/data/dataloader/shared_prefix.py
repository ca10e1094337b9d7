"""Shared prefixes: documents of one dataset row that start with the same tokens, such as two answers to one prompt.

A packed row stores the prefix once, in the first document. The other documents are stored from the last prefix token
on, at whose position their first own token is predicted.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tunekit.data.document import Document, first_target
from tunekit.data.preprocess.tokenized_dataset import ConcatDataset, TokenizedDataset


def shared_prefix_length(first: Document, other: Document) -> int:
    """Number of leading tokens of `other` that need not be stored after `first`.

    Target tokens of `other` are stored, and so is the token that predicts the first of them.
    """
    max_length = min(len(first.tokens), first_target(other) - 1)
    differs = first.tokens[:max_length] != other.tokens[:max_length]
    return int(differs.argmax()) if differs.any() else max_length


def dataset_row_lengths(
    documents: TokenizedDataset | ConcatDataset, docs_per_row: int, share_prefixes: bool = False
) -> np.ndarray:
    """Tokens of each dataset row of `docs_per_row` documents, (rows,); with `share_prefixes`, those that are stored."""
    lengths = documents.lengths if docs_per_row == 1 else documents.lengths.reshape(-1, docs_per_row).sum(axis=1)
    return lengths - shared_prefix_tokens(documents, docs_per_row) if share_prefixes else lengths


def shared_prefix_tokens(documents: TokenizedDataset | ConcatDataset, docs_per_row: int) -> np.ndarray:
    """Number of tokens of each dataset row of `docs_per_row` documents that need not be stored, (rows,)."""
    starts = range(0, len(documents), docs_per_row)
    counts = (
        [shared_prefix_length(documents[start], documents[start + i]) for i in range(1, docs_per_row)]
        for start in starts
    )
    return np.fromiter(map(sum, counts), np.int64, len(starts))


def prefix_lengths(row: Sequence[Document], docs_per_row: int) -> list[int]:
    """Length of the prefix that each document of a packed row shares with the first one of its dataset row."""
    return [shared_prefix_length(row[i - i % docs_per_row], row[i]) if i % docs_per_row else 0 for i in range(len(row))]


def without_prefix(document: Document, length: int) -> Document:
    """Document without its first `length` tokens."""
    return document._replace(tokens=document.tokens[length:], loss_mask=document.loss_mask[length:])


def locate_prefixes(
    rows: Sequence[Sequence[Document]], lengths: Sequence[Sequence[int]], docs_per_row: int, width: int
) -> Tensor | None:
    """Length and start in the flattened tokens of the prefix of each document, (documents, 2) int32.

    `rows` are documents without their prefixes. The padding of a row of `width` tokens counts as a document. None: no
    document has a prefix in another one.
    """
    prefixes: list[tuple[int, int]] = []
    for index, (row, row_lengths) in enumerate(zip(rows, lengths, strict=True)):
        bounds = index * width + np.cumsum([0, *(len(document.tokens) for document in row)])
        prefixes += [
            (length, int(bounds[i - i % docs_per_row]) if length else 0) for i, length in enumerate(row_lengths)
        ]
        prefixes += [(0, 0)] * int(bounds[-1] < (index + 1) * width)
    return torch.tensor(prefixes, dtype=torch.int32) if any(length for length, _ in prefixes) else None
