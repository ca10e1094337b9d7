"""What ranks that share a layer, a row or experts send each other, in functions that autograd follows.

Whoever sends a part gets the gradient of it from all who used it, added up. Tensors are plain ones.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh

from tunekit.distributed.context import DistributedContext
from tunekit.distributed.sharding import shards_of, to_local

SplitSizes = Sequence[int]  # rows for each rank of a team

# Names since torch 2.13, which warns of those before.
_gather = vars(dist).get("all_gather_single") or dist.all_gather_into_tensor
_reduce = vars(dist).get("reduce_scatter_single") or dist.reduce_scatter_tensor


@dataclass(frozen=True, eq=False)
class MeshDim:
    """Ranks that exchange tensors, and which of them this is."""

    group: dist.ProcessGroup
    size: int
    index: int

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, name: str) -> "MeshDim":
        return cls(mesh.get_group(name), mesh[name].size(), mesh.get_local_rank(name))

    def split_sizes(self, count: int) -> tuple[int, ...]:
        """How many each rank has of so many, the first ones one more if they do not go up."""
        quotient, remainder = divmod(count, self.size)
        return tuple(quotient + (i < remainder) for i in range(self.size))

    @_disable_dynamo
    @torch.no_grad()
    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        dist.all_reduce(x, group=self.group)
        return x

    @_disable_dynamo
    @torch.no_grad()
    def all_reduce_max(self, x: Tensor) -> Tensor:
        """The largest of each number on any rank, in place."""
        dist.all_reduce(x, dist.ReduceOp.MAX, self.group)
        return x

    def all_gather(self, output: Tensor, x: Tensor) -> None:
        """`whole` with the rows of all ranks, in their order."""
        _gather(output, x, self.group)

    def reduce_scatter(self, output: Tensor, x: Tensor) -> None:
        """`part` with this rank's rows of the sum over the ranks."""
        _reduce(output, x, group=self.group)

    def all_to_all(
        self, output: Tensor, x: Tensor, send_counts: SplitSizes | None = None, recv_counts: SplitSizes | None = None
    ) -> None:
        """`rows` with those of `x` that the ranks have for this one: as many as `here` says, for as many as `there`."""
        split_sizes = (
            (None, None) if recv_counts is None or send_counts is None else (list(recv_counts), list(send_counts))
        )
        dist.all_to_all_single(output, x, *split_sizes, self.group)


class FakeMeshDim(MeshDim):
    """Ranks of which this one, the first, is alone there, and exchanges nothing: to see what it would need."""

    def __init__(self, size: int) -> None:
        super().__init__(cast(dist.ProcessGroup, None), size, 0)

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        return x

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, output: Tensor, x: Tensor) -> None:
        pass

    def reduce_scatter(self, output: Tensor, x: Tensor) -> None:
        pass

    def all_to_all(
        self, output: Tensor, x: Tensor, send_counts: SplitSizes | None = None, recv_counts: SplitSizes | None = None
    ) -> None:
        pass


# Collectives on plain tensors


def all_gather_tensor(x: Tensor, dim: int, mesh_dim: MeshDim) -> Tensor:
    """Parts of one size side by side along `dim`."""
    rows = x.movedim(dim, 0).contiguous()
    output = rows.new_empty(len(rows) * mesh_dim.size, *rows.shape[1:])
    mesh_dim.all_gather(output, rows)
    return output.movedim(0, dim)


def reduce_scatter_tensor(x: Tensor, dim: int, mesh_dim: MeshDim) -> Tensor:
    """This rank's part along `dim` of the sum over the ranks."""
    rows = x.movedim(dim, 0).contiguous()
    output = rows.new_empty(len(rows) // mesh_dim.size, *rows.shape[1:])
    mesh_dim.reduce_scatter(output, rows)
    return output.movedim(0, dim)


def all_to_all_tensor(x: Tensor, send_counts: SplitSizes, recv_counts: SplitSizes, mesh_dim: MeshDim) -> Tensor:
    """Rows (N, ...), of which each rank gets as many as `there` says, for as many from each as `here` says."""
    output = x.new_empty(sum(recv_counts), *x.shape[1:])
    mesh_dim.all_to_all(output, x.contiguous(), send_counts, recv_counts)
    return output


@dataclass(frozen=True, eq=False)
class VocabShard:
    """Ids that are divided over the ranks of a team, in parts of these sizes, and what has a number for each."""

    mesh_dim: MeshDim
    sizes: tuple[int, ...]

    @property
    def start(self) -> int:
        """The first id that is here."""
        return sum(self.sizes[: self.mesh_dim.index])

    @property
    def total(self) -> int:
        return sum(self.sizes)

    @property
    def max_size(self) -> int:
        """How many the rank has that has most."""
        return max(self.sizes)

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        return self.mesh_dim.all_reduce_sum(x)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return self.mesh_dim.all_reduce_max(x)

    def all_gather(self, x: Tensor) -> Tensor:
        """(..., total) from the columns of each rank."""
        return gather_columns(x, self.sizes, self.mesh_dim)


# The same with gradients


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, mesh_dim: MeshDim) -> Tensor:
        ctx.how = dim, mesh_dim
        return all_gather_tensor(x, dim, mesh_dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter_tensor(grads[0], *ctx.how), None, None


class ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, mesh_dim: MeshDim) -> Tensor:
        ctx.how = dim, mesh_dim
        return reduce_scatter_tensor(x, dim, mesh_dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return all_gather_tensor(grads[0], *ctx.how), None, None


class GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: SplitSizes, mesh_dim: MeshDim) -> Tensor:
        ctx.start, ctx.size = sum(sizes[: mesh_dim.index]), sizes[mesh_dim.index]
        shards = all_gather_tensor(F.pad(x, (0, max(sizes) - x.shape[-1])), -1, mesh_dim).chunk(mesh_dim.size, dim=-1)
        return torch.cat([part[..., :size] for part, size in zip(shards, sizes, strict=True)], dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].narrow(-1, ctx.start, ctx.size), None, None


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, send_counts: SplitSizes, recv_counts: SplitSizes, mesh_dim: MeshDim, factor: float
    ) -> Tensor:
        ctx.how, ctx.factor = (recv_counts, send_counts, mesh_dim), factor
        return all_to_all_tensor(x, send_counts, recv_counts, mesh_dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return all_to_all_tensor(grads[0], *ctx.how) * ctx.factor, None, None, None, None


@_disable_dynamo
def all_gather(x: Tensor, dim: int, mesh_dim: MeshDim) -> Tensor:
    """The parts of all ranks side by side along `dim`; back comes the sum of what each makes of it."""
    return AllGather.apply(x, dim, mesh_dim)


@_disable_dynamo
def reduce_scatter(x: Tensor, dim: int, mesh_dim: MeshDim) -> Tensor:
    """This rank's part along `dim` of the sum over all ranks."""
    return ReduceScatter.apply(x, dim, mesh_dim)


@_disable_dynamo
def gather_columns(x: Tensor, sizes: SplitSizes, mesh_dim: MeshDim) -> Tensor:
    """Columns of all ranks, in parts of these sizes, of which all ranks then make the same."""
    return GatherColumns.apply(x, sizes, mesh_dim)


@_disable_dynamo
def all_to_all(
    x: Tensor, send_counts: SplitSizes, recv_counts: SplitSizes, mesh_dim: MeshDim, factor: float = 1.0
) -> Tensor:
    """Rows that travel: so many to each rank, for so many from each. Gradients come back times `factor`."""
    return AllToAll.apply(x, send_counts, recv_counts, mesh_dim, factor)


# The tokens of layers that are shared


class NoParallel:
    """No other rank has a part in a layer: all of its tokens are here."""

    def enter(self, x: Tensor, shape: torch.Size | None = None) -> Tensor:
        """All tokens (B, S, dim) of those between two layers. With no `shape` (B, S), rows may be joined and padded."""
        return x

    def leave(self, y: Tensor) -> Tensor:
        """What is kept between two layers of what one made of all tokens."""
        return y

    def local_tokens(self, x: Tensor) -> Tensor:
        """The tokens that are kept here between two layers."""
        return x


@dataclass(frozen=True, eq=False)
class SequenceParallelRegion(NoParallel):
    """Each rank makes a part of the sum that a layer gives. Between two layers each keeps a part of the tokens.

    These are (1, n, dim), the same number on all ranks: behind the last there is padding.
    """

    mesh_dim: MeshDim

    def enter(self, x: Tensor, shape: torch.Size | None = None) -> Tensor:
        tokens = all_gather(x, 1, self.mesh_dim)
        return tokens if shape is None else tokens[0, : shape.numel()].view(*shape, -1)

    def leave(self, y: Tensor) -> Tensor:
        return reduce_scatter(self.flatten_padded(y), 1, self.mesh_dim)

    def local_tokens(self, x: Tensor) -> Tensor:
        return self.flatten_padded(x).chunk(self.mesh_dim.size, dim=1)[self.mesh_dim.index]

    def flatten_padded(self, x: Tensor) -> Tensor:
        """(B, S, ...) as one row that can be divided."""
        row = x.flatten(0, 1)
        num_padding = -len(row) % self.mesh_dim.size
        return (F.pad(row, (0, 0) * (row.ndim - 1) + (0, num_padding)) if num_padding else row)[None]


class ReplicatedRegion(SequenceParallelRegion):
    """Each rank makes all that a layer gives, and keeps its own tokens of it."""

    def leave(self, y: Tensor) -> Tensor:
        return self.local_tokens(y)


NO_PARALLEL = NoParallel()


# What all that share layers have alike


@torch.no_grad()
def all_reduce_tp_gradients(parameters: Iterable[Tensor], context: DistributedContext) -> None:
    """Gradients of what is not split over the ranks that share layers: each has seen a part of tokens or of sums."""
    if context.dims.tp == 1:
        return
    assert context.mesh is not None
    mesh_dim = MeshDim.from_mesh(context.mesh, "tensor")
    replicated = [w for w in parameters if w.grad is not None and not any(s.kind == "tensor" for s in shards_of(w))]
    for dtype in dict.fromkeys(w.dtype for w in replicated):
        grads = [to_local(w.grad) for w in replicated if w.dtype == dtype and w.grad is not None]
        flat = mesh_dim.all_reduce_sum(torch.cat([grad.reshape(-1) for grad in grads]))
        for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(total.view_as(grad))
