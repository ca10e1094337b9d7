"""Maps local shards of parameters to slices of the full tensors. The identity on one process."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.weak import WeakIdKeyDictionary

from tunekit.models.weight_init import InitMixin, WeightStorage, upload_tensor
from tunekit.models.weight_map import Shape


@dataclass(frozen=True, eq=False)
class Shard:
    """Dimension of a tensor that is split over the ranks of a group, with these sizes."""

    kind: Literal["tensor", "expert"]  # ranks that hold the other shards
    dim: int
    sizes: tuple[int, ...]
    index: int  # of the local shard
    group: dist.ProcessGroup

    @property
    def start(self) -> int:
        return sum(self.sizes[: self.index])


@dataclass(frozen=True)
class ShardSlice:
    """Shape of a full tensor, and offset of the local shard in it."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]

    def slice_local(self, full: Tensor, size: torch.Size) -> Tensor:
        """Local shard of a full tensor, of shape `size`."""
        for dim, (start, length) in enumerate(zip(self.offset, size, strict=True)):
            full = full.narrow(dim, min(start, full.shape[dim]), length)
        return full


# Shards of parameters and buffers that are plain tensors: tensor and expert parallel layers do not use DTensors.
SHARDS = WeakIdKeyDictionary()


def register_shards(named_tensors: Iterable[tuple[str, Tensor]], shards: dict[str, tuple[Shard, ...]]) -> None:
    """Record how these tensors are sharded, by name."""
    for name, tensor in named_tensors:
        if name in shards:
            SHARDS[tensor] = shards[name]


def shards_of(tensor: Tensor) -> tuple[Shard, ...]:
    """Recorded shards of a tensor."""
    return cast("tuple[Shard, ...]", SHARDS.get(tensor, ()))


def to_local(tensor: Tensor) -> Tensor:
    """Local shard of a DTensor; other tensors unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_slice(tensor: Tensor) -> ShardSlice:
    """Slice of the full tensor that the local shard of a parameter holds."""
    shape, offset = list(tensor.shape), [0] * tensor.ndim
    if isinstance(tensor, DTensor):
        _, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        offset = list(start)
    for shard in shards_of(tensor):
        shape[shard.dim] = sum(shard.sizes)
        offset[shard.dim] += shard.start
    return ShardSlice(tuple(shape), tuple(offset))


@torch.no_grad()
def full_tensor(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Full parameter, gathered from all ranks, which must all call this. Read-only.

    A tensor that is sharded like a parameter, such as its gradient, needs that parameter as `like`.
    """
    shards = shards_of(tensor if like is None else like)
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
    for shard in reversed(shards):
        full = gather_shards(full, shard)
    return full


def gather_shards(local: Tensor, shard: Shard) -> Tensor:
    """Concatenate the shards of all ranks of a group, contiguous as kernels of quantized weights expect. Shards may
    differ in size: each is padded to the largest."""
    max_size = max(shard.sizes)
    padded = local.movedim(shard.dim, 0).contiguous()
    if len(padded) < max_size:
        padded = torch.cat([padded, padded.new_zeros(max_size - len(padded), *padded.shape[1:])])
    shards = [torch.empty_like(padded) for _ in shard.sizes]
    dist.all_gather(shards, padded, shard.group)
    full = torch.cat([tensor[:size] for tensor, size in zip(shards, shard.sizes, strict=True)])
    return full.movedim(0, shard.dim).contiguous()


@contextmanager
def unsharded(unit: nn.Module) -> Iterator[None]:
    """Gather the parameters of an FSDP unit within the context, on all ranks. Nested units are not gathered.

    The parameters are different tensors afterwards: look them up again.
    """
    if isinstance(unit, FSDPModule):
        unit.unshard()
    yield
    if isinstance(unit, FSDPModule):
        unit.reshard()


@torch.no_grad()
def copy_to_shard(target: Tensor, full: Tensor) -> None:
    """Copy the local slice of a full tensor into a parameter."""
    local = to_local(target)
    upload_tensor(local, shard_slice(target).slice_local(full, local.shape))


class ShardedStorage(WeightStorage):
    """Parameters that may store a shard of the full weight."""

    def full_shape(self, parameter: Tensor) -> Shape:
        return shard_slice(parameter).shape

    def copy(self, parameter: Tensor, full: Tensor) -> None:
        copy_to_shard(parameter, full)


SHARDED_STORAGE = ShardedStorage()


def use_sharded_storage(model: nn.Module) -> None:
    """Make all modules of a model initialize and load local shards of their weights."""
    for module in model.modules():
        if isinstance(module, InitMixin):
            module.weight_storage = SHARDED_STORAGE
