"""One micro-batch."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

IGNORE = -100


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
        moved = {name: vars(self)[name].to(device, non_blocking=True) for name in ("tokens", "targets", "positions")}
        return replace(self, **moved)
