"""Which part of a tensor lives on this rank. On one process that is all of it, and nothing here does anything."""

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

from tunekit.devices import is_pinned_on

UPLOAD_CHUNK_BYTES = 64 * 2**20  # bytes that are sent to a device at a time


@dataclass(frozen=True, eq=False)
class Shard:
    """A dimension of a tensor that is divided over the ranks of a group, in parts of these sizes."""

    kind: Literal["tensor", "expert"]  # which ranks share it
    dim: int
    sizes: tuple[int, ...]
    index: int  # which part is here
    group: dist.ProcessGroup

    @property
    def start(self) -> int:
        return sum(self.sizes[: self.index])


@dataclass(frozen=True)
class ShardSlice:
    """Where the part of a tensor that is here begins in the whole, and what shape that has."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]

    def slice_local(self, full: Tensor, size: torch.Size) -> Tensor:
        """The part, of this size."""
        for dim, (start, length) in enumerate(zip(self.offset, size, strict=True)):
            full = full.narrow(dim, min(start, full.shape[dim]), length)
        return full


# Parameters and buffers that are but a part of the model's, in tensors that do not know it: layers that are split
# compute with plain ones.
SHARDS = WeakIdKeyDictionary()


def register_shards(named_tensors: Iterable[tuple[str, Tensor]], shards: dict[str, tuple[Shard, ...]]) -> None:
    """From now on it is known of these tensors how they are split, by their names."""
    for name, tensor in named_tensors:
        if name in shards:
            SHARDS[tensor] = shards[name]


def shards_of(tensor: Tensor) -> tuple[Shard, ...]:
    return cast("tuple[Shard, ...]", SHARDS.get(tensor, ()))


def to_local(tensor: Tensor) -> Tensor:
    """What of a tensor is in the memory of this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_slice(tensor: Tensor) -> ShardSlice:
    """Where the local part of a parameter lies in the whole."""
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
    """All of a parameter, gathered from the ranks, which all have to ask for it; not to be written to.

    What belongs to a parameter, such as its gradient, is split as that one: `like`.
    """
    shards = shards_of(tensor if like is None else like)
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
    for shard in reversed(shards):
        full = gather_shards(full, shard)
    return full


def gather_shards(local: Tensor, shard: Shard) -> Tensor:
    """The parts of all ranks of a group, side by side and contiguous, as kernels of packed weights read them. They may
    differ in size: each is sent in the room of the largest."""
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
    """For a while the parameters of a unit are whole, on all ranks at once. Those of units inside it stay as they are.

    They are no longer the same tensors: what is filled has to be looked up again behind it.
    """
    if isinstance(unit, FSDPModule):
        unit.unshard()
    yield
    if isinstance(unit, FSDPModule):
        unit.reshard()


@torch.no_grad()
def copy_to_shard(target: Tensor, full: Tensor) -> None:
    """Copy a whole tensor into a parameter, which keeps the part of it that lives on this rank."""
    local = to_local(target)
    upload(local, shard_slice(target).slice_local(full, local.shape))


def upload(target: Tensor, source: Tensor) -> None:
    """Copy a tensor to a device, where it is cast: `copy_` would cast it on the CPU first, and send twice the bytes if
    bf16 becomes fp32. Rows go in pieces through pinned memory, so that neither side has a second copy of the whole."""
    if target.device.type == "cpu" or source.device.type != "cpu" or not target.ndim or not target.numel():
        target.copy_(source)
        return
    rows = max(1, UPLOAD_CHUNK_BYTES * len(source) // source.nbytes)
    for target_rows, source_rows in zip(target.split(rows), source.split(rows), strict=True):
        chunk = source_rows.pin_memory() if is_pinned_on(target.device) else source_rows
        target_rows.copy_(chunk.to(target.device, non_blocking=True))


def adopt_tensor(target: Tensor, full: Tensor) -> None:
    """`put` for a tensor that nobody else holds: it becomes the parameter's own, where it fits as it is.

    Nearly all time of loading on the CPU goes into touching memory for the first time, and so is saved.
    """
    same_layout = (full.dtype, full.device, full.stride()) == (target.dtype, target.device, target.stride())
    # MKL's product of fp32 and one row has another last bit where memory is not aligned as torch does it.
    is_aligned = full.itemsize < 4 or full.data_ptr() % 64 == 0
    is_unsharded = type(target.data) is Tensor and full.shape == target.shape
    if same_layout and is_aligned and is_unsharded and full.untyped_storage().nbytes() == full.nbytes:
        target.data = full
    else:
        copy_to_shard(target, full)
