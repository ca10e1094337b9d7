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

Apart = Sequence[int]  # rows for each rank of a team

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
    def along(cls, mesh: DeviceMesh, name: str) -> "MeshDim":
        return cls(mesh.get_group(name), mesh[name].size(), mesh.get_local_rank(name))

    def even(self, count: int) -> tuple[int, ...]:
        """How many each rank has of so many, the first ones one more if they do not go up."""
        least, more = divmod(count, self.size)
        return tuple(least + (i < more) for i in range(self.size))

    @_disable_dynamo
    @torch.no_grad()
    def add(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        dist.all_reduce(x, group=self.group)
        return x

    @_disable_dynamo
    @torch.no_grad()
    def largest(self, x: Tensor) -> Tensor:
        """The largest of each number on any rank, in place."""
        dist.all_reduce(x, dist.ReduceOp.MAX, self.group)
        return x

    def fill(self, whole: Tensor, rows: Tensor) -> None:
        """`whole` with the rows of all ranks, in their order."""
        _gather(whole, rows, self.group)

    def reduce(self, part: Tensor, rows: Tensor) -> None:
        """`part` with this rank's rows of the sum over the ranks."""
        _reduce(part, rows, group=self.group)

    def swap(self, rows: Tensor, x: Tensor, there: Apart | None = None, here: Apart | None = None) -> None:
        """`rows` with those of `x` that the ranks have for this one: as many as `here` says, for as many as `there`."""
        apart = (None, None) if here is None or there is None else (list(here), list(there))
        dist.all_to_all_single(rows, x, *apart, self.group)


class FakeMeshDim(MeshDim):
    """Ranks of which this one, the first, is alone there, and exchanges nothing: to see what it would need."""

    def __init__(self, size: int) -> None:
        super().__init__(cast(dist.ProcessGroup, None), size, 0)

    def add(self, x: Tensor) -> Tensor:
        return x

    def largest(self, x: Tensor) -> Tensor:
        return x

    def fill(self, whole: Tensor, rows: Tensor) -> None:
        pass

    def reduce(self, part: Tensor, rows: Tensor) -> None:
        pass

    def swap(self, rows: Tensor, x: Tensor, there: Apart | None = None, here: Apart | None = None) -> None:
        pass


# Collectives on plain tensors


def all_gather_tensor(x: Tensor, dim: int, team: MeshDim) -> Tensor:
    """Parts of one size side by side along `dim`."""
    rows = x.movedim(dim, 0).contiguous()
    whole = rows.new_empty(len(rows) * team.size, *rows.shape[1:])
    team.fill(whole, rows)
    return whole.movedim(0, dim)


def reduce_scatter_tensor(x: Tensor, dim: int, team: MeshDim) -> Tensor:
    """This rank's part along `dim` of the sum over the ranks."""
    rows = x.movedim(dim, 0).contiguous()
    part = rows.new_empty(len(rows) // team.size, *rows.shape[1:])
    team.reduce(part, rows)
    return part.movedim(0, dim)


def all_to_all_tensor(x: Tensor, there: Apart, here: Apart, team: MeshDim) -> Tensor:
    """Rows (N, ...), of which each rank gets as many as `there` says, for as many from each as `here` says."""
    rows = x.new_empty(sum(here), *x.shape[1:])
    team.swap(rows, x.contiguous(), there, here)
    return rows


@dataclass(frozen=True, eq=False)
class VocabShard:
    """Ids that are divided over the ranks of a team, in parts of these sizes, and what has a number for each."""

    team: MeshDim
    sizes: tuple[int, ...]

    @property
    def start(self) -> int:
        """The first id that is here."""
        return sum(self.sizes[: self.team.index])

    @property
    def total(self) -> int:
        return sum(self.sizes)

    @property
    def most(self) -> int:
        """How many the rank has that has most."""
        return max(self.sizes)

    def add(self, x: Tensor) -> Tensor:
        return self.team.add(x)

    def largest(self, x: Tensor) -> Tensor:
        return self.team.largest(x)

    def whole(self, x: Tensor) -> Tensor:
        """(..., total) from the columns of each rank."""
        return gather_columns(x, self.sizes, self.team)


# The same with gradients


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, team: MeshDim) -> Tensor:
        ctx.how = dim, team
        return all_gather_tensor(x, dim, team)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter_tensor(grads[0], *ctx.how), None, None


class ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, team: MeshDim) -> Tensor:
        ctx.how = dim, team
        return reduce_scatter_tensor(x, dim, team)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return all_gather_tensor(grads[0], *ctx.how), None, None


class GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Apart, team: MeshDim) -> Tensor:
        ctx.start, ctx.size = sum(sizes[: team.index]), sizes[team.index]
        parts = all_gather_tensor(F.pad(x, (0, max(sizes) - x.shape[-1])), -1, team).chunk(team.size, dim=-1)
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].narrow(-1, ctx.start, ctx.size), None, None


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Apart, here: Apart, team: MeshDim, factor: float) -> Tensor:
        ctx.how, ctx.factor = (here, there, team), factor
        return all_to_all_tensor(x, there, here, team)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return all_to_all_tensor(grads[0], *ctx.how) * ctx.factor, None, None, None, None


@_disable_dynamo
def all_gather(x: Tensor, dim: int, team: MeshDim) -> Tensor:
    """The parts of all ranks side by side along `dim`; back comes the sum of what each makes of it."""
    return AllGather.apply(x, dim, team)


@_disable_dynamo
def reduce_scatter(x: Tensor, dim: int, team: MeshDim) -> Tensor:
    """This rank's part along `dim` of the sum over all ranks."""
    return ReduceScatter.apply(x, dim, team)


@_disable_dynamo
def gather_columns(x: Tensor, sizes: Apart, team: MeshDim) -> Tensor:
    """Columns of all ranks, in parts of these sizes, of which all ranks then make the same."""
    return GatherColumns.apply(x, sizes, team)


@_disable_dynamo
def all_to_all(x: Tensor, there: Apart, here: Apart, team: MeshDim, factor: float = 1.0) -> Tensor:
    """Rows that travel: so many to each rank, for so many from each. Gradients come back times `factor`."""
    return AllToAll.apply(x, there, here, team, factor)


# The tokens of layers that are shared


class NoParallel:
    """No other rank has a part in a layer: all of its tokens are here."""

    def enter(self, x: Tensor, shape: torch.Size | None = None) -> Tensor:
        """All tokens (B, S, dim) of those between two layers. With no `shape` (B, S), rows may be joined and padded."""
        return x

    def leave(self, y: Tensor) -> Tensor:
        """What is kept between two layers of what one made of all tokens."""
        return y

    def keep(self, x: Tensor) -> Tensor:
        """The tokens that are kept here between two layers."""
        return x


@dataclass(frozen=True, eq=False)
class SequenceParallelRegion(NoParallel):
    """Each rank makes a part of the sum that a layer gives. Between two layers each keeps a part of the tokens.

    These are (1, n, dim), the same number on all ranks: behind the last there is padding.
    """

    team: MeshDim

    def enter(self, x: Tensor, shape: torch.Size | None = None) -> Tensor:
        whole = all_gather(x, 1, self.team)
        return whole if shape is None else whole[0, : shape.numel()].view(*shape, -1)

    def leave(self, y: Tensor) -> Tensor:
        return reduce_scatter(self.padded(y), 1, self.team)

    def keep(self, x: Tensor) -> Tensor:
        return self.padded(x).chunk(self.team.size, dim=1)[self.team.index]

    def padded(self, x: Tensor) -> Tensor:
        """(B, S, ...) as one row that can be divided."""
        row = x.flatten(0, 1)
        lacking = -len(row) % self.team.size
        return (F.pad(row, (0, 0) * (row.ndim - 1) + (0, lacking)) if lacking else row)[None]


class ReplicatedRegion(SequenceParallelRegion):
    """Each rank makes all that a layer gives, and keeps its own tokens of it."""

    def leave(self, y: Tensor) -> Tensor:
        return self.keep(y)


ALONE = NoParallel()


# What all that share layers have alike


@torch.no_grad()
def all_reduce_tp_gradients(weights: Iterable[Tensor], run: DistributedContext) -> None:
    """Gradients of what is not split over the ranks that share layers: each has seen a part of tokens or of sums."""
    if run.sizes.tp == 1:
        return
    assert run.mesh is not None
    team = MeshDim.along(run.mesh, "tensor")
    alike = [w for w in weights if w.grad is not None and not any(s.kind == "tensor" for s in shards_of(w))]
    for dtype in dict.fromkeys(w.dtype for w in alike):
        grads = [to_local(w.grad) for w in alike if w.dtype == dtype and w.grad is not None]
        flat = team.add(torch.cat([grad.reshape(-1) for grad in grads]))
        for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(total.view_as(grad))
