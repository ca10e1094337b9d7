"""Documents of a unit that begin alike, as answers to one prompt do: what they share is written once in a packed row.

A document is then written from its last shared token on, which is where its first own one is predicted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tunekit.data.dataloader.mixture import ConcatDataset
from tunekit.data.preprocess.tokenized_dataset import Document, TokenizedDataset, first_target


def shared(first: Document, other: Document) -> int:
    """How many of the first tokens of `other` need not be written behind `first`.

    Those of which something is learnt are written, and the one that predicts the first of them.
    """
    most = min(len(first.tokens), first_target(other) - 1)
    differ = first.tokens[:most] != other.tokens[:most]
    return int(differ.argmax()) if differ.any() else most


def shared_prefix_tokens(documents: TokenizedDataset | ConcatDataset, each: int) -> np.ndarray:
    """Tokens of each unit of `each` documents that need not be written (units,)."""
    units = range(0, len(documents), each)
    counts = ([shared(documents[at], documents[at + i]) for i in range(1, each)] for at in units)
    return np.fromiter(map(sum, counts), np.int64, len(units))


@dataclass(frozen=True)
class SharedPrefixRows:
    """Rows of documents as they are written, and how many tokens of the first of its unit each goes on from."""

    rows: list[list[Document]]
    counts: list[list[int]]
    each: int

    @staticmethod
    def of(rows: Sequence[Sequence[Document]], each: int) -> "SharedPrefixRows":
        counts = [[shared(row[i - i % each], row[i]) if i % each else 0 for i in range(len(row))] for row in rows]
        cut = [[behind(*one) for one in zip(row, of, strict=True)] for row, of in zip(rows, counts, strict=True)]
        return SharedPrefixRows(cut, counts, each)

    def prefixes(self, width: int) -> Tensor | None:
        """(documents, 2) int32, of what pads a row too: tokens that each goes on from, and where they are.

        None: each is whole.
        """
        found: list[tuple[int, int]] = []
        for number, (row, counts) in enumerate(zip(self.rows, self.counts, strict=True)):
            ends = number * width + np.cumsum([0, *(len(document.tokens) for document in row)])
            found += [(count, int(ends[i - i % self.each]) if count else 0) for i, count in enumerate(counts)]
            found += [(0, 0)] * int(ends[-1] < (number + 1) * width)
        return torch.tensor(found, dtype=torch.int32) if any(count for count, _ in found) else None


def behind(document: Document, count: int) -> Document:
    """What is left of a document without its first tokens."""
    return document._replace(tokens=document.tokens[count:], learnt=document.loss_mask[count:])
