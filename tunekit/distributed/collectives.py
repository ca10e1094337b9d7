"""Differentiable collectives between the ranks of a mesh dimension, and the regions of tensor parallel layers.

Tensors are plain tensors. The gradient of a sent tensor is the sum of the gradients on all ranks that used it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh

from tunekit.distributed.context import DistributedContext
from tunekit.distributed.sharding import Shard, shards_of, to_local
from tunekit.errors import UserError
from tunekit.models.decoder import Decoder
from tunekit.models.tp_region import NoParallel

SplitSizes = Sequence[int]  # rows per rank
TensorFn = Callable[[Tensor], Tensor]

# Names since torch 2.13, which deprecates the former ones.
_all_gather_into = vars(dist).get("all_gather_single") or dist.all_gather_into_tensor
_reduce_scatter_into = vars(dist).get("reduce_scatter_single") or dist.reduce_scatter_tensor


@dataclass(frozen=True, eq=False)
class MeshDim:
    """Process group of one mesh dimension, and the index of this rank in it."""

    group: dist.ProcessGroup
    size: int
    index: int

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, name: str) -> "MeshDim":
        return cls(mesh.get_group(name), mesh[name].size(), mesh.get_local_rank(name))

    def split_sizes(self, count: int) -> tuple[int, ...]:
        """Number of items per rank for `count` items. The first ranks get the remainder."""
        quotient, remainder = divmod(count, self.size)
        return tuple(quotient + (i < remainder) for i in range(self.size))

    @_disable_dynamo
    @torch.no_grad()
    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        dist.all_reduce(x, group=self.group)
        return x

    @_disable_dynamo
    @torch.no_grad()
    def all_reduce_max(self, x: Tensor) -> Tensor:
        """Elementwise maximum over the ranks, in place."""
        dist.all_reduce(x, dist.ReduceOp.MAX, self.group)
        return x

    def gather_columns(self, x: Tensor, total: int) -> Tensor:
        """Columns (..., total) of all ranks, split by `split_sizes`."""
        return gather_columns(x, self.split_sizes(total), self)

    def all_gather(self, output: Tensor, x: Tensor) -> None:
        """Write the rows of all ranks to `output`, in rank order."""
        _all_gather_into(output, x, self.group)

    def reduce_scatter(self, output: Tensor, x: Tensor) -> None:
        """Write the rows of this rank of the sum over the ranks to `output`."""
        _reduce_scatter_into(output, x, group=self.group)

    def all_to_all(
        self, output: Tensor, x: Tensor, send_counts: SplitSizes | None = None, recv_counts: SplitSizes | None = None
    ) -> None:
        """Send `send_counts` rows of `x` to each rank and receive `recv_counts` from each; equal counts by default."""
        recv_sizes, send_sizes = (counts and list(counts) for counts in (recv_counts, send_counts))
        dist.all_to_all_single(output, x, recv_sizes, send_sizes, self.group)


class FakeMeshDim(MeshDim):
    """First of `size` ranks that do not exist, without communication: to estimate memory and check divisibility."""

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
    """Concatenate shards of equal size along `dim`."""
    rows = x.movedim(dim, 0).contiguous()
    output = rows.new_empty(len(rows) * mesh_dim.size, *rows.shape[1:])
    mesh_dim.all_gather(output, rows)
    return output.movedim(0, dim)


def reduce_scatter_tensor(x: Tensor, dim: int, mesh_dim: MeshDim) -> Tensor:
    """Shard of this rank, along `dim`, of the sum over the ranks."""
    rows = x.movedim(dim, 0).contiguous()
    output = rows.new_empty(len(rows) // mesh_dim.size, *rows.shape[1:])
    mesh_dim.reduce_scatter(output, rows)
    return output.movedim(0, dim)


def all_to_all_tensor(x: Tensor, send_counts: SplitSizes, recv_counts: SplitSizes, mesh_dim: MeshDim) -> Tensor:
    """Send `send_counts` rows (N, ...) to each rank and receive `recv_counts` from each."""
    output = x.new_empty(sum(recv_counts), *x.shape[1:])
    mesh_dim.all_to_all(output, x.contiguous(), send_counts, recv_counts)
    return output


@dataclass(frozen=True, eq=False)
class VocabShard:
    """Vocabulary ids that are split over ranks, with these sizes."""

    mesh_dim: MeshDim
    sizes: tuple[int, ...]

    @property
    def start(self) -> int:
        """First id of this rank."""
        return sum(self.sizes[: self.mesh_dim.index])

    @property
    def total(self) -> int:
        return sum(self.sizes)

    @property
    def max_size(self) -> int:
        """Number of ids of the largest shard."""
        return max(self.sizes)

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        return self.mesh_dim.all_reduce_sum(x)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return self.mesh_dim.all_reduce_max(x)

    def all_gather(self, x: Tensor) -> Tensor:
        """Logits (..., total) from the local columns of each rank."""
        return gather_columns(x, self.sizes, self.mesh_dim)


# Differentiable collectives


class Collective(torch.autograd.Function):
    """A collective, and the one that its gradient passes through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fn: TensorFn, backward_fn: TensorFn) -> Tensor:
        ctx.backward_fn = backward_fn
        return fn(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward_fn(grads[0]), None, None


@_disable_dynamo
def all_gather(x: Tensor, dim: int, mesh_dim: MeshDim) -> Tensor:
    """Concatenate the shards of all ranks along `dim`. The gradient is summed over the ranks."""
    args = {"dim": dim, "mesh_dim": mesh_dim}
    return Collective.apply(x, partial(all_gather_tensor, **args), partial(reduce_scatter_tensor, **args))


@_disable_dynamo
def reduce_scatter(x: Tensor, dim: int, mesh_dim: MeshDim) -> Tensor:
    """Shard of this rank, along `dim`, of the sum over the ranks."""
    args = {"dim": dim, "mesh_dim": mesh_dim}
    return Collective.apply(x, partial(reduce_scatter_tensor, **args), partial(all_gather_tensor, **args))


@_disable_dynamo
def gather_columns(x: Tensor, sizes: SplitSizes, mesh_dim: MeshDim) -> Tensor:
    """Concatenate columns of all ranks, with these sizes. All ranks must use the result in the same way."""

    def gather(x: Tensor) -> Tensor:
        shards = all_gather_tensor(F.pad(x, (0, max(sizes) - x.shape[-1])), -1, mesh_dim).chunk(mesh_dim.size, dim=-1)
        return torch.cat([shard[..., :size] for shard, size in zip(shards, sizes, strict=True)], dim=-1)

    start, size = sum(sizes[: mesh_dim.index]), sizes[mesh_dim.index]
    return Collective.apply(x, gather, lambda grad: grad.narrow(-1, start, size))


@_disable_dynamo
def all_to_all(
    x: Tensor, send_counts: SplitSizes, recv_counts: SplitSizes, mesh_dim: MeshDim, factor: float = 1.0
) -> Tensor:
    """Send `send_counts` rows to each rank, receive `recv_counts` from each. Gradients are multiplied by `factor`."""
    send = partial(all_to_all_tensor, send_counts=send_counts, recv_counts=recv_counts, mesh_dim=mesh_dim)
    send_back = partial(all_to_all_tensor, send_counts=recv_counts, recv_counts=send_counts, mesh_dim=mesh_dim)
    return Collective.apply(x, send, lambda grad: send_back(grad) * factor)


# Regions of tensor parallel layers


@dataclass(frozen=True, eq=False)
class SequenceParallelRegion(NoParallel):
    """Tensor parallel layer with sequence parallelism (arXiv:2205.05198): each rank computes a partial sum of the
    outputs, and holds a shard of the tokens between layers.

    Shards are (1, n, dim), with the same n on all ranks: the last ones are padded.
    """

    mesh_dim: MeshDim

    @property
    def index(self) -> int:
        return self.mesh_dim.index

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        return self.mesh_dim.all_reduce_sum(x.detach().clone()) + (x - x.detach())

    def enter(self, x: Tensor, shape: torch.Size | None = None) -> Tensor:
        tokens = all_gather(x, 1, self.mesh_dim)
        return tokens if shape is None else tokens[0, : shape.numel()].view(*shape, -1)

    def leave(self, y: Tensor) -> Tensor:
        return reduce_scatter(self.flatten_padded(y), 1, self.mesh_dim)

    def local_tokens(self, x: Tensor) -> Tensor:
        return self.flatten_padded(x).chunk(self.mesh_dim.size, dim=1)[self.mesh_dim.index]

    def flatten_padded(self, x: Tensor) -> Tensor:
        """(B, S, ...) as one row, padded to a multiple of the number of ranks."""
        row = x.flatten(0, 1)
        num_padding = -len(row) % self.mesh_dim.size
        return (F.pad(row, (0, 0) * (row.ndim - 1) + (0, num_padding)) if num_padding else row)[None]


class ReplicatedRegion(SequenceParallelRegion):
    """Layer that each rank computes in full, between sequence parallel layers."""

    def leave(self, y: Tensor) -> Tensor:
        return self.local_tokens(y)


# Gradients of replicated parameters


@torch.no_grad()
def all_reduce_tp_gradients(parameters: Iterable[Tensor], context: DistributedContext) -> None:
    """Sum the gradients of replicated parameters over tensor parallel ranks, which see different tokens or partial
    sums."""
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


def shard_parameters(
    model: Decoder,
    module: str,
    dims: Mapping[str, int],
    sizes: tuple[int, ...],
    mesh_dim: MeshDim,
    kind: Literal["tensor", "expert"],
) -> None:
    """Keep the local shard of each tensor of a module in `dims` (tensor name to dimension).

    `sizes` are the shard sizes of the unquantized weight; those of quantized tensors are proportional.
    """
    owner, total = model.get_submodule(module), sum(sizes)
    tensors = {**dict(owner.named_parameters()), **dict(owner.named_buffers())}
    for leaf, dim in ((leaf, dim) for leaf, dim in dims.items() if leaf in tensors):
        full = tensors[leaf]
        shard_sizes = tuple(size * full.shape[dim] // total for size in sizes)
        shape = [*full.shape[:dim], shard_sizes[mesh_dim.index], *full.shape[dim + 1 :]]
        local = torch.empty(shape, dtype=full.dtype, device=full.device)
        holder, _, name = leaf.rpartition(".")
        if isinstance(full, nn.Parameter):
            local = nn.Parameter(local, requires_grad=full.requires_grad)
        setattr(owner.get_submodule(holder), name, local)
        shard = Shard(kind, dim, shard_sizes, mesh_dim.index, mesh_dim.group)
        model.shards[f"{module}.{leaf}"] = (*model.shards.get(f"{module}.{leaf}", ()), shard)


def check_splittable(layer: nn.Module, where: str) -> None:
    """Raise UserError for double-quantized scales, which are stored for all blocks of a weight together."""
    if "outer_scales" in dict(layer.named_parameters(recurse=False)):
        remedy = "Set quantization.double_quant=false."
        raise UserError(f"{where} has double-quantized scales, which cannot be split. {remedy}")
