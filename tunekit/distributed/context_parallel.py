"""Context parallelism: ranks share each row. Keys and values of complete rows are gathered on all ranks.

Each rank holds two chunks of each row, one from each end, so that causal attention costs all ranks the same.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.distributed.collectives import MeshDim, all_gather
from tunekit.models.forward_context import SequenceSharding


@dataclass(frozen=True, eq=False)
class ContextParallelSharding(SequenceSharding):
    """Rows are padded to two chunks per rank; rank n holds the n-th chunk from each end."""

    mesh_dim: MeshDim

    def chunk_size(self, length: int) -> int:
        """Tokens per chunk."""
        return -(-length // (2 * self.mesh_dim.size))

    def local_ranges(self, length: int) -> tuple[range, ...]:
        size, first = self.chunk_size(length), self.mesh_dim.index
        last = 2 * self.mesh_dim.size - 1 - first
        return tuple(range(index * size, (index + 1) * size) for index in (first, last))

    def local_tokens(self, x: Tensor, value: int = 0) -> Tensor:
        length = x.shape[1]
        num_padding = 2 * self.mesh_dim.size * self.chunk_size(length) - length
        x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, num_padding), value=value) if num_padding else x
        return torch.cat([x[:, chunk.start : chunk.stop] for chunk in self.local_ranges(length)], dim=1)

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        return self.mesh_dim.all_reduce_sum(x.detach().clone()) + (x - x.detach())

    def gather(self, x: Tensor, length: int) -> Tensor:
        chunks = all_gather(x, 1, self.mesh_dim).chunk(2 * self.mesh_dim.size, dim=1)
        return torch.cat([*chunks[::2], *chunks[::-2]], dim=1)[:, :length]
