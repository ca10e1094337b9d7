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

PIECE = 64 * 2**20  # bytes that are sent to a device at a time


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

    def of(self, whole: Tensor, size: torch.Size) -> Tensor:
        """The part, of this size."""
        for dim, (start, length) in enumerate(zip(self.offset, size, strict=True)):
            whole = whole.narrow(dim, min(start, whole.shape[dim]), length)
        return whole


# Parameters and buffers that are but a part of the model's, in tensors that do not know it: layers that are split
# compute with plain ones.
SPLITS = WeakIdKeyDictionary()


def register_shards(named: Iterable[tuple[str, Tensor]], splits: dict[str, tuple[Shard, ...]]) -> None:
    """From now on it is known of these tensors how they are split, by their names."""
    for name, tensor in named:
        if name in splits:
            SPLITS[tensor] = splits[name]


def shards_of(tensor: Tensor) -> tuple[Shard, ...]:
    return cast("tuple[Shard, ...]", SPLITS.get(tensor, ()))


def to_local(tensor: Tensor) -> Tensor:
    """What of a tensor is in the memory of this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_slice(tensor: Tensor) -> ShardSlice:
    """Where the local part of a parameter lies in the whole."""
    shape, offset = list(tensor.shape), [0] * tensor.ndim
    if isinstance(tensor, DTensor):
        _, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        offset = list(start)
    for split in shards_of(tensor):
        shape[split.dim] = sum(split.sizes)
        offset[split.dim] += split.start
    return ShardSlice(tuple(shape), tuple(offset))


@torch.no_grad()
def full_tensor(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """All of a parameter, gathered from the ranks, which all have to ask for it; not to be written to.

    What belongs to a parameter, such as its gradient, is split as that one: `like`.
    """
    splits = shards_of(tensor if like is None else like)
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
    for split in reversed(splits):
        found = gather_shards(found, split)
    return found


def gather_shards(here: Tensor, split: Shard) -> Tensor:
    """The parts of all ranks of a group, side by side and contiguous, as kernels of packed weights read them. They may
    differ in size: each is sent in the room of the largest."""
    most = max(split.sizes)
    room = here.movedim(split.dim, 0).contiguous()
    if len(room) < most:
        room = torch.cat([room, room.new_zeros(most - len(room), *room.shape[1:])])
    parts = [torch.empty_like(room) for _ in split.sizes]
    dist.all_gather(parts, room, split.group)
    whole = torch.cat([one[:size] for one, size in zip(parts, split.sizes, strict=True)])
    return whole.movedim(0, split.dim).contiguous()


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
def copy_to_shard(target: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor into a parameter, which keeps the part of it that lives on this rank."""
    here = to_local(target)
    upload(here, shard_slice(target).of(whole, here.shape))


def upload(target: Tensor, source: Tensor) -> None:
    """Copy a tensor to a device, where it is cast: `copy_` would cast it on the CPU first, and send twice the bytes if
    bf16 becomes fp32. Rows go in pieces through pinned memory, so that neither side has a second copy of the whole."""
    if target.device.type == "cpu" or source.device.type != "cpu" or not target.ndim or not target.numel():
        target.copy_(source)
        return
    rows = max(1, PIECE * len(source) // source.nbytes)
    for target_rows, source_rows in zip(target.split(rows), source.split(rows), strict=True):
        sent = source_rows.pin_memory() if is_pinned_on(target.device) else source_rows
        target_rows.copy_(sent.to(target.device, non_blocking=True))


def adopt_tensor(target: Tensor, whole: Tensor) -> None:
    """`put` for a tensor that nobody else holds: it becomes the parameter's own, where it fits as it is.

    Nearly all time of loading on the CPU goes into touching memory for the first time, and so is saved.
    """
    like = (whole.dtype, whole.device, whole.stride()) == (target.dtype, target.device, target.stride())
    # MKL's product of fp32 and one row has another last bit where memory is not aligned as torch does it.
    aligned = whole.itemsize < 4 or whole.data_ptr() % 64 == 0
    plain = type(target.data) is Tensor and whole.shape == target.shape
    if like and aligned and plain and whole.untyped_storage().nbytes() == whole.nbytes:
        target.data = whole
    else:
        copy_to_shard(target, whole)
