"""Shared prefixes: documents of one dataset row that start with the same tokens, such as two answers to one prompt.

A packed row stores the prefix once, in the first document. The other documents are stored from the last prefix token
on, at whose position their first own token is predicted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tunekit.data.preprocess.tokenized_dataset import ConcatDataset, Document, TokenizedDataset, first_target


def shared_prefix_length(first: Document, other: Document) -> int:
    """Number of leading tokens of `other` that need not be stored after `first`.

    Target tokens of `other` are stored, and so is the token that predicts the first of them.
    """
    max_length = min(len(first.tokens), first_target(other) - 1)
    differs = first.tokens[:max_length] != other.tokens[:max_length]
    return int(differs.argmax()) if differs.any() else max_length


def shared_prefix_tokens(documents: TokenizedDataset | ConcatDataset, docs_per_row: int) -> np.ndarray:
    """Number of tokens of each dataset row of `docs_per_row` documents that need not be stored, (rows,)."""
    starts = range(0, len(documents), docs_per_row)
    counts = (
        [shared_prefix_length(documents[start], documents[start + i]) for i in range(1, docs_per_row)]
        for start in starts
    )
    return np.fromiter(map(sum, counts), np.int64, len(starts))


@dataclass(frozen=True)
class SharedPrefixRows:
    """Packed rows of documents without their shared prefixes, and the length of each removed prefix."""

    rows: list[list[Document]]
    prefix_lengths: list[list[int]]
    docs_per_row: int

    @staticmethod
    def from_rows(rows: Sequence[Sequence[Document]], docs_per_row: int) -> "SharedPrefixRows":
        """Remove from each document the prefix that it shares with the first of its dataset row."""
        n = docs_per_row
        lengths = [
            [shared_prefix_length(row[i - i % n], row[i]) if i % n else 0 for i in range(len(row))] for row in rows
        ]
        suffixes = [list(map(without_prefix, row, counts)) for row, counts in zip(rows, lengths, strict=True)]
        return SharedPrefixRows(suffixes, lengths, docs_per_row)

    def prefixes(self, width: int) -> Tensor | None:
        """Length and start in the flattened tokens of the prefix of each document, (documents, 2) int32.

        The padding of a row counts as a document. None: no document has a prefix in another one.
        """
        prefixes: list[tuple[int, int]] = []
        for index, (row, lengths) in enumerate(zip(self.rows, self.prefix_lengths, strict=True)):
            bounds = index * width + np.cumsum([0, *(len(document.tokens) for document in row)])
            prefixes += [
                (length, int(bounds[i - i % self.docs_per_row]) if length else 0) for i, length in enumerate(lengths)
            ]
            prefixes += [(0, 0)] * int(bounds[-1] < (index + 1) * width)
        return torch.tensor(prefixes, dtype=torch.int32) if any(length for length, _ in prefixes) else None


def without_prefix(document: Document, length: int) -> Document:
    """Document without its first `length` tokens."""
    return document._replace(tokens=document.tokens[length:], loss_mask=document.loss_mask[length:])
