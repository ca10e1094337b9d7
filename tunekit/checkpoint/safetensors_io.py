"""Reads and writes single tensors of safetensors and torch.save files."""

import json
import math
import os
import pickle
import struct
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from io import FileIO
from mmap import ACCESS_COPY, MADV_DONTNEED, PAGESIZE, mmap
from pathlib import Path
from typing import Any, BinaryIO
from weakref import finalize

import torch
from torch import Tensor

from tunekit.errors import UserError
from tunekit.models.weight_init import named_generator, normal_init
from tunekit.models.weight_map import Shape

# By safetensors name, in the reverse of the order in which the library writes them to a file.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
CONFIG_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}  # in JSON files
DTYPE_NAMES = {dtype: kind for kind, dtype in DTYPES.items()}
# Errors of torch.load for a file that is corrupt or contains code.
PICKLE_ERRORS = (pickle.UnpicklingError, zipfile.BadZipFile, struct.error, AssertionError, AttributeError)
PICKLE_ERRORS += (ArithmeticError, EOFError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)
CHUNK = 2**24  # bytes per read of a thread
ROWS_PER_CHUNK = 4096  # rows of an embedding in fp64
HEADER_LENGTH = struct.Struct("<Q")
MAX_HEADER_LENGTH = 100_000_000  # bytes, as in the safetensors library
HEADER_ERRORS = (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError, struct.error)
MAX_NAME_LENGTH = 1000  # characters of a tensor name
FORMAT = {"format": "pt"}  # required by transformers
Entries = Mapping[str, tuple[Shape, torch.dtype]]


class OpenFiles:
    """Cache of open files, memory maps and unpickled files."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.threads = self.stack.enter_context(ThreadPoolExecutor(torch.get_num_threads()))
        self.streams: dict[Path, FileIO] = {}
        self.maps: dict[Path, mmap] = {}  # never closed, because tensors may still use them
        self.mapped_tensors: set[TensorMeta] = set()
        self.pickles: dict[Path, Mapping[str, Tensor]] = {}

    def open(self, file: Path) -> int:
        """Descriptor of a file, which is opened once."""
        if file not in self.streams:
            self.streams[file] = self.stack.enter_context(FileIO(file))
        return self.streams[file].fileno()

    def read_into(self, buffer: Tensor, file: Path, start: int) -> None:
        """Fill `buffer` with bytes from `start`, with as many threads as torch uses."""
        handle, view = self.open(file), buffer.numpy().data

        def read_chunk(offset: int) -> None:
            read_bytes(handle, view[offset : offset + CHUNK], start + offset, file)

        list(self.threads.map(read_chunk, range(0, len(view), CHUNK)))  # raises the first error

    def map_file(self, file: Path) -> mmap:
        """Copy-on-write memory map of a file."""
        if file not in self.maps:
            self.maps[file] = mmap(self.open(file), 0, access=ACCESS_COPY)
        return self.maps[file]

    def read_pickle(self, file: Path) -> Mapping[str, Tensor]:
        if file not in self.pickles:
            self.pickles[file] = load_pickle(file)
        return self.pickles[file]

    def close(self) -> None:
        self.pickles.clear()
        self.stack.close()


def read_bytes(handle: int, view: memoryview, start: int, file: Path) -> None:
    while view:
        count = os.preadv(handle, [view], start)
        if not count:
            raise truncated_error(file)
        view, start = view[count:], start + count


def truncated_error(file: Path) -> UserError:
    return UserError(f"{file}: file was truncated while reading. Download it again.")


@dataclass(frozen=True)
class TensorMeta:
    """File, shape and dtype of a tensor that is not read yet."""

    file: Path
    shape: Shape
    dtype: torch.dtype

    def read(self, files: OpenFiles) -> Tensor:
        """Read the tensor into new memory."""
        raise NotImplementedError

    def read_mapped(self, files: OpenFiles) -> Tensor:
        """Return the tensor in a memory map of the file if possible, else in new memory."""
        return self.read(files)


@dataclass(frozen=True)
class TensorSlice(TensorMeta):
    """Tensor in a safetensors file, from byte `start`."""

    start: int

    def read(self, files: OpenFiles) -> Tensor:
        tensor = torch.empty(self.shape, dtype=self.dtype)
        files.read_into(tensor.reshape(-1).view(torch.uint8), self.file, self.start)
        return tensor

    @property
    def size(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read_mapped(self, files: OpenFiles) -> Tensor:
        if not self.size or self.start % self.dtype.itemsize or self in files.mapped_tensors:
            return self.read(files)
        files.mapped_tensors.add(self)  # map a tensor only once, because the caller may write to it
        stop, mapped = self.start + self.size, files.map_file(self.file)
        if len(mapped) < stop:
            raise truncated_error(self.file)
        view = memoryview(mapped)[self.start : stop]
        # Release the pages of this tensor when it is no longer used.
        first, last = -(-self.start // PAGESIZE) * PAGESIZE, stop // PAGESIZE * PAGESIZE
        if first < last:
            finalize(view, mapped.madvise, MADV_DONTNEED, first, last - first).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8).view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class TorchPickleTensor(TensorMeta):
    """Tensor in a torch.save file. Tensors of one file may share memory, so reading copies."""

    name: str

    def read(self, files: OpenFiles) -> Tensor:
        return files.read_pickle(self.file)[self.name].clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class RandomTensor(TensorMeta):
    """Randomly initialized score head that is in no file yet. `file` is where it will be saved."""

    seed: int
    std: float

    def read(self, files: OpenFiles) -> Tensor:
        return normal_init(self.shape, self.std, named_generator(self.seed, "head")).to(self.dtype)


@dataclass(frozen=True)
class ResizedTensor(TensorMeta):
    """Embedding or head with additional rows, which are the mean of the rows of `base`, as in transformers."""

    base: TensorMeta
    row_sources: tuple[tuple[int, tuple[int, ...]], ...] = ()  # other rows, and the rows that they are the mean of

    def read(self, files: OpenFiles) -> Tensor:
        base = self.base.read(files)
        weight = base.new_empty(self.shape)
        weight[: len(base)] = base
        mean = torch.stack([part.double().sum(0) for part in base.split(ROWS_PER_CHUNK)]).sum(0) / len(base)
        weight[len(base) :] = mean
        for row, sources in self.row_sources:
            weight[row] = base[[*sources]].double().mean(0) if sources else mean
        return weight


@dataclass(frozen=True)
class ReplacedRows(TensorMeta):
    """Tensor with rows that are in another tensor."""

    base: TensorMeta
    rows: TensorMeta
    ids: tuple[int, ...]

    def read(self, files: OpenFiles) -> Tensor:
        weight = self.base.read(files)
        weight[[*self.ids]] = self.rows.read(files).to(weight.dtype)
        return weight


class TensorReader:
    """Reads tensors of a checkpoint one at a time."""

    def __init__(self, tensors: Mapping[str, TensorMeta]) -> None:
        self.tensors, self.files = tensors, OpenFiles()

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(self, *error: object) -> None:
        self.files.close()

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name].read(self.files)

    def read_mapped(self, name: str) -> Tensor:
        """Return the tensor in a memory map of its file if possible. Copy it or keep it, but request it only once."""
        return self.tensors[name].read_mapped(self.files)


@dataclass(frozen=True)
class SafetensorsHeader:
    """Header of a safetensors file."""

    text: bytes  # JSON
    tensors: dict[str, TensorMeta]
    metadata: Mapping[str, str]

    @staticmethod
    def read(file: Path) -> "SafetensorsHeader":
        """Read and check a header, with the rules of the safetensors library. Raises UserError."""
        if not file.is_file():  # a FIFO would block
            raise UserError(f"{file}: not a regular file")
        try:
            with file.open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size - HEADER_LENGTH.size
                (length,) = HEADER_LENGTH.unpack(stream.read(HEADER_LENGTH.size))
                if length > min(size, MAX_HEADER_LENGTH):
                    raise ValueError(f"the header has {length} bytes, the file only {size}")
                text = stream.read(length)
            entries = json.loads(text.decode(), object_pairs_hook=partial(unique_entries, file))
            metadata = entries.pop("__metadata__", None)
            metadata = {} if metadata is None else metadata
            if not all(isinstance(value, str) for value in metadata.values()):
                raise ValueError("__metadata__ must map names to texts")
            return SafetensorsHeader(text, parse_entries(file, entries, length, size - length), metadata)
        except HEADER_ERRORS as error:
            raise UserError(f"{file}: corrupt or truncated file ({error}). Download it again.") from error


def parse_entries(file: Path, entries: Mapping[str, Any], length: int, size: int) -> dict[str, TensorMeta]:
    """Tensors of a file, whose data have `size` bytes after a header of `length` bytes, without gaps and overlaps."""
    if invalid := next((name for name in entries if not name.isprintable() or len(name) > MAX_NAME_LENGTH), None):
        raise UserError(f"{file}: invalid tensor name {invalid[:80]!r}")
    tensors: dict[str, TensorMeta] = {}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        shape, (start, stop) = tuple(entry["shape"]), entry["data_offsets"]
        dtype = parse_dtype(file, name, entry["dtype"])
        if not all(type(number) is int and 0 <= number < 2**63 for number in (*shape, start, stop)):
            raise ValueError(f"{name}: shape and data_offsets must be integers")
        if start != end or stop - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name}: data_offsets do not fit to its shape or to other tensors")
        tensors[name], end = TensorSlice(file, shape, dtype, HEADER_LENGTH.size + length + start), stop
    if end != size:
        raise ValueError(f"the tensors have {end} bytes, the file has {size}")
    return {name: tensors[name] for name in entries}


def unique_entries(file: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises UserError for a repeated name, of which the library takes the last."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{file}: tensor {repeated!r} is in the header twice")
    return entries


def parse_dtype(file: Path, key: str, kind: str) -> torch.dtype:
    if kind not in DTYPES:
        raise UserError(f"{file}: {key} has the unsupported dtype {kind}")
    return DTYPES[kind]


def read_pickle_header(file: Path) -> dict[str, TensorMeta]:
    tensors = load_pickle(file)
    return {name: TorchPickleTensor(file, tuple(t.shape), t.dtype, name) for name, t in tensors.items()}


def load_pickle(file: Path) -> Mapping[str, Tensor]:
    """Memory-map the tensors of a torch.save file by name. No code in the file is run."""
    try:
        # Files of torch before 1.6 cannot be mapped.
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except PICKLE_ERRORS as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{file}: corrupt file, or not only tensors ({reason}). No code was run.") from error
    if isinstance(tensors, dict) and all(isinstance(n, str) and isinstance(t, Tensor) for n, t in tensors.items()):
        return tensors
    raise UserError(f"{file}: must contain a dict of tensors")


class SafetensorsWriter:
    """Writes a safetensors file with a given header. Tensors can be written in any order, one at a time."""

    def __init__(
        self,
        file: Path,
        entries: Entries,
        like: SafetensorsHeader | None = None,
        metadata: Mapping[str, str] = FORMAT,
        exists: bool = False,
    ) -> None:
        """Create the file, or open it if it `exists`, so that several processes can write to it.

        Tensor order and metadata are copied from `like`, byte for byte if it has the same tensors.
        """
        text = copy_header(like, entries) if like is not None else None
        text = text or build_header(entries, metadata if like is None else {**like.metadata, **FORMAT})
        begin = HEADER_LENGTH.size + len(text)
        header = json.loads(text)
        self.byte_ranges = {name: [begin + offset for offset in header[name]["data_offsets"]] for name in entries}
        self.stream: BinaryIO = file.open("r+b" if exists else "wb")
        if not exists:
            self.stream.write(HEADER_LENGTH.pack(len(text)) + text)
            self.stream.truncate(max((stop for _, stop in self.byte_ranges.values()), default=begin))

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self.stream.close()

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        start, stop = self.byte_ranges[name]
        assert tensor.nbytes == stop - start, f"{name}: {tensor.nbytes} bytes for {stop - start}"
        self.stream.seek(start)
        self.stream.write(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def copy_header(like: SafetensorsHeader, entries: Entries) -> bytes | None:
    """Header of another file if it describes exactly `entries`, else None."""
    layout = {name: (meta.shape, meta.dtype) for name, meta in like.tensors.items()}
    return like.text if like.metadata.get("format") == FORMAT["format"] and layout == dict(entries) else None


def build_header(entries: Entries, metadata: Mapping[str, str]) -> bytes:
    """Build a header with the tensors in the order of the safetensors library: widest dtype first, then by name."""
    order = list(DTYPES.values())[::-1]
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, (shape, dtype) in sorted(entries.items(), key=lambda item: (order.index(item[1][1]), item[0])):
        size = torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % HEADER_LENGTH.size)
