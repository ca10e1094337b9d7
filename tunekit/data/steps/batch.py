"""One micro-batch, and how the rows of a step become those of a rank."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tunekit.data.prepared.documents import Document, Documents
from tunekit.data.steps.mix import Joined

IGNORE = -100
# Rows are padded to a multiple of this many tokens: kernels are made and tuned anew for every other shape.
MULTIPLE = 16
TENSORS = ("tokens", "targets", "positions")


@dataclass(frozen=True)
class Batch:
    """B rows of S tokens; tensors but `offsets` are (B, S) int64. `targets`: the next token if learnt, else IGNORE.

    `positions` count from 0 in each document. `offsets` (documents + 1,), int32 on the CPU, bounds the documents in the
    flattened B·S tokens (what pads a row is a document too); None: each row is one document with padding at its end.
    `learnt` counts the targets that are not IGNORE, `real` the tokens that are not padding.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    offsets: Tensor | None
    learnt: int
    real: int

    def to(self, device: torch.device | str) -> "Batch":
        return replace(self, **{name: vars(self)[name].to(device, non_blocking=True) for name in TENSORS})

    def pinned(self) -> "Batch":
        """In memory from which a GPU can copy while it computes."""
        return replace(self, **{name: vars(self)[name].pin_memory() for name in TENSORS})


@dataclass(frozen=True)
class Layout:
    """How the `batch` rows of a step lie: on which of `size` ranks, `micro_batch` rows at once, filled with `pad`.

    `capacity` is the tokens of a packed row; None: each document is a row of its own.
    """

    batch: int
    micro_batch: int
    rank: int
    size: int
    pad: int
    capacity: int | None

    def batches(self, documents: Documents | Joined, rows: Sequence[np.ndarray]) -> list[Batch]:
        """The micro-batches of this rank. Every rank has equally many, so that all take part in all exchanges."""
        tokens = [int(documents.lengths[row].sum()) for row in rows]
        # Longest first: rows of like length share a micro-batch, and a step that does not fit in memory fails at once.
        order = sorted(range(len(rows)), key=tokens.__getitem__, reverse=True)
        mine = [[documents[int(i)] for i in rows[row]] for row in order[self.rank :: self.size]]
        parts = [mine[first : first + self.micro_batch] for first in range(0, len(mine), self.micro_batch)]
        missing = -(-len(rows[:: self.size]) // self.micro_batch) - len(parts)
        if not missing:
            return [self.collate(part) for part in parts]
        # A rank with fewer rows goes through the motions with the others, on a row of which it learns nothing.
        shortest = [documents[int(i)] for i in rows[order[-1]]]
        return [self.collate(part) for part in parts] + [blank(self.collate([shortest]))] * missing

    def collate(self, rows: Sequence[Sequence[Document]]) -> Batch:
        """Rows of documents side by side, each filled up at its end."""
        sizes = [sum(len(document.tokens) for document in row) for row in rows]
        longest = max(sizes)
        width = max(longest, min(-(-longest // MULTIPLE) * MULTIPLE, self.capacity or longest + MULTIPLE))
        tokens = np.full(len(rows) * width, self.pad, np.int64)
        targets = np.full_like(tokens, IGNORE)
        bounds = [0]
        for end_of_row, row in enumerate(rows, 1):
            for document in row:
                start, end = bounds[-1], bounds[-1] + len(document.tokens)
                tokens[start:end] = document.tokens
                targets[start : end - 1] = np.where(document.learnt[1:], document.tokens[1:], IGNORE)
                bounds.append(end)
            if self.capacity and bounds[-1] < end_of_row * width:
                bounds.append(end_of_row * width)  # what pads a packed row is a document of its own
            bounds[-1] = end_of_row * width
        positions = np.arange(len(tokens)) - np.repeat(bounds[:-1], np.diff(bounds))
        return Batch(
            *(torch.from_numpy(flat).view(len(rows), width) for flat in (tokens, targets, positions)),
            offsets=torch.tensor(bounds, dtype=torch.int32) if self.capacity else None,
            learnt=int((targets != IGNORE).sum()),
            real=sum(sizes),
        )


def blank(batch: Batch) -> Batch:
    """The same of which nothing is learnt."""
    return replace(batch, targets=torch.full_like(batch.targets, IGNORE), learnt=0, real=0)
