"""Reads and writes sharded tensors with torch.distributed.checkpoint (DCP).

A shard is a rectangular slice of a tensor. Names and full shapes do not depend on the parallel layout, so a state can
be read with any other layout.
"""

import math
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
# Globals in DCP metadata. Any other global in a pickle could run code.
ALLOWED_GLOBALS = {
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
# Raised for a state file that cannot be parsed or contains values of other types. Its checksum can still be correct.
READ_ERRORS = (
    pickle.UnpicklingError, ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, MemoryError,
    OSError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
TENSOR_OVERHEAD = 4096  # bytes per tensor in addition to its data: a zip header and a metadata entry


@dataclass(frozen=True)
class LocalShard:
    """Local shard of a tensor and its location in the full tensor. Implements the three methods that DCP calls."""

    tensor: Tensor
    location: ShardSlice

    @property
    def chunks(self) -> list[ChunkStorageMetadata]:
        """Location as DCP metadata; empty if this rank has no elements of the tensor."""
        if not self.tensor.numel() and math.prod(self.location.shape):
            return []
        return [ChunkStorageMetadata(torch.Size(self.location.offset), self.tensor.shape)]

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        properties, size = TensorProperties.create_from_tensor(self.tensor), torch.Size(self.location.shape)
        properties.pin_memory = False  # irrelevant for readers
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, size),
            )
            for chunk in self.chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self.chunks

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.tensor


LocalShards = Mapping[str, LocalShard]


def reshard(model: nn.Module) -> None:
    """Free weights that FSDP has gathered, so that parameters are local shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@dataclass(frozen=True)
class WritePlan:
    """Assignment of shards to ranks. Replicated shards are written by one rank."""

    layout_hashes: list[int]  # per rank; the plan is reused while they are unchanged
    local: SavePlan
    metadata: Metadata
    num_bytes: int  # on disk, over all ranks


def plan_writes(shards: LocalShards, dist: DistributedContext, previous: WritePlan | None) -> WritePlan:
    """Build the write plan of all ranks. Returns `previous` if no layout has changed."""
    items = [item for name, shard in shards.items() for item in shard.__create_write_items__(name, shard)]
    layout = [(i.index, i.tensor_data.chunk.sizes, i.tensor_data.size, str(i.tensor_data.properties.dtype))
             for i in items if i.tensor_data is not None]  # fmt: skip
    layout_hashes = dist.all_gather_objects(hash(tuple(layout)))
    if previous is not None and previous.layout_hashes == layout_hashes:
        return previous
    planned, metadata = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(
        dist.all_gather_objects(SavePlan(items))
    )
    plans = FileSystemWriter("").prepare_global_plan(planned)
    sizes = (tensor_bytes(item) + TENSOR_OVERHEAD for plan in plans for item in plan.items)
    return WritePlan(layout_hashes, plans[dist.rank], metadata, sum(sizes))


def tensor_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    assert data is not None and data.chunk is not None, "only tensors are written"
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


class SavePlanner(DefaultSavePlanner):
    """Looks up shards by name."""

    def __init__(self, shards: LocalShards) -> None:
        super().__init__(flatten_state_dict=False)
        self.shards = shards

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.shards[index.fqn].tensor


class LoadPlanner(DefaultLoadPlanner):
    """Looks up shards by name."""

    def __init__(self, shards: LocalShards, metadata: Metadata) -> None:
        super().__init__(flatten_state_dict=False)
        self.shards = shards
        self.state_dict, self.metadata = {**shards}, metadata

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.shards[index.fqn].tensor


@dataclass(frozen=True)
class ShardWriteResult:
    """Locations of the shards that a rank has written, and checksums of its files."""

    results: list[WriteResult]
    checksums: dict[str, int]


def write_shards(
    folder: Path, shards: LocalShards, plan: SavePlan, extra_files: Mapping[str, bytes]
) -> ShardWriteResult:
    """Write and fsync the shards of this rank and its extra files."""
    # No copy-ahead: its thread would initialize CUDA on the first GPU.
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
    results = writer.write_data(plan, SavePlanner(shards)).value() if plan.items else []
    for name, content in extra_files.items():
        with (folder / name).open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
    files = {result.storage_data.relative_path for result in results} | extra_files.keys()
    return ShardWriteResult(results, {name: atomic.checksum(folder / name) for name in sorted(files)})


def write_metadata(folder: Path, metadata: Metadata, results: Sequence[ShardWriteResult]) -> dict[str, int]:
    """Write the DCP metadata and return the checksums of all files."""
    FileSystemWriter(folder).finish(replace(metadata), [result.results for result in results])
    checksums = {METADATA: atomic.checksum(folder / METADATA)}
    return checksums | {name: value for result in results for name, value in result.checksums.items()}


class CorruptStateError(Exception):
    """A state file is truncated, changed, or has unexpected contents."""

    def __init__(self, file: Path) -> None:
        super().__init__(f"{file}: file is corrupt or truncated")


@contextmanager
def wrap_read_errors(file: Path) -> Iterator[None]:
    """Turn errors of the block, which reads a state file or directory, into CorruptStateErrors."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except READ_ERRORS as error:
        raise CorruptStateError(file) from error


def load_shards(folder: Path, shards: LocalShards, metadata: Metadata) -> None:
    """Read the shards of this rank in place."""
    reader, planner = FileSystemReader(folder), LoadPlanner(shards, metadata)
    with wrap_read_errors(folder):
        reader.set_up_storage_reader(metadata, True)
        reader.read_data(reader.prepare_local_plan(planner.create_local_plan()), planner).wait()


def read_metadata(folder: Path) -> Metadata:
    """Read the DCP metadata without running code from the pickle."""
    with wrap_read_errors(folder / METADATA):
        metadata = MetadataUnpickler(BytesIO((folder / METADATA).read_bytes())).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"unexpected {type(metadata)}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        return metadata


class MetadataUnpickler(pickle.Unpickler):
    """Unpickler that accepts only the globals of DCP metadata."""

    def find_class(self, module: str, name: str) -> object:
        if name not in ALLOWED_GLOBALS.get(module, ()):
            raise pickle.UnpicklingError(f"unexpected global {module}.{name}")
        return super().find_class(module, name)
