"""Tensors of which each rank has a piece, as torch.distributed.checkpoint writes and reads them.

A piece is a box of a whole tensor. Names and whole shapes do not depend on how a model is divided, so whatever one
layout has written, any other reads.
"""

import math
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.fsdp import FSDPModule

from tunekit.checkpoint import atomic
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.sharding import ShardSlice

METADATA = ".metadata"
DTYPES = {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
# What torch writes into the metadata. Everything else that a pickle can name is code.
KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": DTYPES | {"Size"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # Python 3.13
}
HEADERS = 4096  # bytes that a tensor takes beside its numbers: a zip header of its own, and a line in the metadata


@dataclass(frozen=True)
class LocalShard:
    """What of a tensor is here, and where it lies in the whole. torch asks any object for these three methods."""

    tensor: Tensor
    box: ShardSlice

    @property
    def chunks(self) -> list[ChunkStorageMetadata]:
        """Where it lies, in torch's words. A rank may have nothing of a tensor that others have."""
        if not self.tensor.numel() and math.prod(self.box.shape):
            return []
        return [ChunkStorageMetadata(torch.Size(self.box.offset), self.tensor.shape)]

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        about, size = TensorProperties.create_from_tensor(self.tensor), torch.Size(self.box.shape)
        about.pin_memory = False  # of no reader's concern
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, about, size)
            )
            for chunk in self.chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self.chunks

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.tensor


Pieces = Mapping[str, LocalShard]


def reshard(model: nn.Module) -> None:
    """Let go of weights that were gathered for a pass: only what lives here is left."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@dataclass(frozen=True)
class WritePlan:
    """Who writes which pieces: one of those that hold the same."""

    keys: list[int]  # what the pieces of each rank look like: as long as they do, nothing is planned anew
    own: SavePlan
    metadata: Metadata
    size: int  # bytes of all, on the disk


def plan_writes(pieces: Pieces, run: DistributedContext, before: WritePlan | None) -> WritePlan:
    """A plan that all ranks agree on; `before` is the last one."""
    items = [item for name, piece in pieces.items() for item in piece.__create_write_items__(name, piece)]
    looks = [(i.index, i.tensor_data.chunk.sizes, i.tensor_data.size, str(i.tensor_data.properties.dtype))
             for i in items if i.tensor_data is not None]  # fmt: skip
    keys = run.gather(hash(tuple(looks)))
    if before is not None and before.keys == keys:
        return before
    planned, metadata = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(run.gather(SavePlan(items)))
    plans = FileSystemWriter("").prepare_global_plan(planned)
    sizes = (tensor_bytes(item) + HEADERS for plan in plans for item in plan.items)
    return WritePlan(keys, plans[run.rank], metadata, sum(sizes))


def tensor_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    assert data is not None and data.chunk is not None, "only tensors are written"
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


class SavePlanner(DefaultSavePlanner):
    """Finds a piece by its name."""

    def __init__(self, pieces: Pieces) -> None:
        super().__init__(flatten_state_dict=False)
        self.pieces = pieces

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.pieces[index.fqn].tensor


class LoadPlanner(DefaultLoadPlanner):
    """Finds a piece by its name."""

    def __init__(self, pieces: Pieces, metadata: Metadata) -> None:
        super().__init__(flatten_state_dict=False)
        self.pieces = pieces
        self.state_dict, self.metadata = {**pieces}, metadata

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.pieces[index.fqn].tensor


@dataclass(frozen=True)
class ShardWriteResult:
    """What a rank has written into a folder: where its pieces are, and checksums of its files."""

    results: list[WriteResult]
    sums: dict[str, int]


def write_shards(folder: Path, pieces: Pieces, own: SavePlan, rest: Mapping[str, bytes]) -> ShardWriteResult:
    """This rank's share of a state, and small files with what else it keeps, on the disk when this returns."""
    # Without copies ahead of the writing: a thread that makes them would begin to use the first GPU.
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
    results = writer.write_data(own, SavePlanner(pieces)).value() if own.items else []
    for name, content in rest.items():
        with (folder / name).open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
    files = {result.storage_data.relative_path for result in results} | rest.keys()
    return ShardWriteResult(results, {name: atomic.checksum(folder / name) for name in sorted(files)})


def write_metadata(folder: Path, metadata: Metadata, written: Sequence[ShardWriteResult]) -> dict[str, int]:
    """Write the file that says where everything is; the checksums of all files."""
    FileSystemWriter(folder).finish(replace(metadata), [one.results for one in written])
    sums = {METADATA: atomic.checksum(folder / METADATA)}
    return sums | {name: value for one in written for name, value in one.sums.items()}


def load_shards(folder: Path, pieces: Pieces, metadata: Metadata) -> None:
    """Read into the pieces of this rank what a folder has for them."""
    reader, planner = FileSystemReader(folder), LoadPlanner(pieces, metadata)
    reader.set_up_storage_reader(metadata, True)
    reader.read_data(reader.prepare_local_plan(planner.create_local_plan()), planner).wait()


class CorruptStateError(Exception):
    """A file of a state that was cut off or changed, or that holds what no state holds."""

    def __init__(self, file: Path) -> None:
        super().__init__(f"cannot read {file}: it is damaged or cut off")


def read_metadata(folder: Path) -> Metadata:
    """Where everything is, without running what a pickle may hold."""
    try:
        metadata = MetadataUnpickler(BytesIO((folder / METADATA).read_bytes())).load()
    except pickle.UnpicklingError as error:
        raise CorruptStateError(folder / METADATA) from error
    metadata.storage_meta = metadata.storage_meta or StorageMeta()
    return metadata


class MetadataUnpickler(pickle.Unpickler):
    """Knows the names that torch writes into the metadata, and no other."""

    def find_class(self, module: str, name: str) -> object:
        if name not in KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong here")
        return super().find_class(module, name)
