"""Tokenised rows, held flat: 5 bytes a token however many rows there are."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from tunekit.data.signs import Sign


class Document(NamedTuple):
    """Token ids (length,) int32, which of them are learnt (length,) bool, and how many there were before it was cut."""

    tokens: np.ndarray
    learnt: np.ndarray
    whole: int
    signs: Sign = Sign(0)


class Documents:
    """All documents of a data set, one after the other in two flat arrays.

    `lengths` (documents,) counts their tokens, `truncated` those that were cut, `targets` the tokens to learn: a
    document's first token is never one.
    """

    def __init__(self, documents: Iterable[Document]) -> None:
        tokens, learnt, self.whole = [np.empty(0, np.int32)], [np.empty(0, bool)], []
        for document in documents:
            tokens.append(document.tokens)
            learnt.append(document.learnt)
            self.whole.append(document.whole)
        self.lengths = np.array([len(part) for part in tokens[1:]], np.int64)
        self.bounds = np.concatenate(([0], np.cumsum(self.lengths)))
        self.tokens, self.learnt = np.concatenate(tokens), np.concatenate(learnt)
        self.truncated = int((self.lengths < self.whole).sum())
        self.targets = int(self.learnt.sum() - self.learnt[self.bounds[:-1]].sum())

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Document:
        if not 0 <= index < len(self):
            raise IndexError(index)
        part = slice(self.bounds[index], self.bounds[index + 1])
        return Document(self.tokens[part], self.learnt[part], self.whole[index])
