"""Long rows that several ranks share: queries stay where they are, keys and values of whole rows go to all.

Each rank has two stretches of every row, one from each end, so that all have as many keys to look at.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.distributed.collectives import MeshDim, all_gather
from tunekit.distributed.context import DistributedContext
from tunekit.models.decoder import Decoder
from tunekit.models.forward_context import Rows


def apply_context_parallel(model: Decoder, run: DistributedContext) -> None:
    if run.rows is not None:
        model.rows = ContextParallelSharding(MeshDim.along(run.rows, "context"))


@dataclass(frozen=True, eq=False)
class ContextParallelSharding(Rows):
    """Rows are padded to two stretches for each rank of a team, of which the n-th has the n-th from each end."""

    team: MeshDim

    def size(self, length: int) -> int:
        """Tokens of a stretch."""
        return -(-length // (2 * self.team.size))

    def stretches(self, length: int) -> tuple[range, ...]:
        size, last = self.size(length), 2 * self.team.size - 1
        return tuple(range(at * size, (at + 1) * size) for at in (self.team.index, last - self.team.index))

    def keep(self, x: Tensor, value: int = 0) -> Tensor:
        length = x.shape[1]
        lacking = 2 * self.team.size * self.size(length) - length
        x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, lacking), value=value) if lacking else x
        return torch.cat([x[:, some.start : some.stop] for some in self.stretches(length)], dim=1)

    def sum(self, x: Tensor) -> Tensor:
        return self.team.add(x.detach().clone()) + (x - x.detach())

    def gather(self, x: Tensor, length: int) -> Tensor:
        parts = all_gather(x, 1, self.team).chunk(2 * self.team.size, dim=1)
        return torch.cat([*parts[::2], *parts[::-2]], dim=1)[:, :length]
