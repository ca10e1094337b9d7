"""Tensors in files: where each lies, reading one at a time, writing them in any order."""

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
from io import FileIO
from mmap import ACCESS_COPY, MADV_DONTNEED, PAGESIZE, mmap
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO
from weakref import finalize

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tunekit.errors import UserError
from tunekit.models.weight_init import named_generator, normal_init
from tunekit.models.weight_map import Shape

# What safetensors calls them, in the order in which its own writer puts them into a file, from behind.
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
NAMES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}  # in JSON files
KINDS = {dtype: kind for kind, dtype in DTYPES.items()}
# What torch raises over a pickle that is damaged, or asks for something to be run.
BROKEN = (pickle.UnpicklingError, zipfile.BadZipFile, struct.error, AssertionError, AttributeError, ArithmeticError)
BROKEN += (EOFError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)
CHUNK = 2**24  # bytes that one thread reads at a time
LENGTH = struct.Struct("<Q")
FORMAT = {"format": "pt"}  # without it transformers does not open a file
Entries = Mapping[str, tuple[Shape, torch.dtype]]


class OpenFiles:
    """Open files, each opened once."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.threads = self.stack.enter_context(ThreadPoolExecutor(torch.get_num_threads()))
        self.streams: dict[Path, FileIO] = {}
        self.maps: dict[Path, mmap] = {}  # never closed: tensors that were lent keep them
        self.lent: set[TensorMeta] = set()
        self.pickles: dict[Path, Mapping[str, Tensor]] = {}

    def fill(self, buffer: Tensor, file: Path, start: int) -> None:
        """Read the bytes of `buffer` from `start` on, by as many threads as torch has."""
        if file not in self.streams:
            self.streams[file] = self.stack.enter_context(FileIO(file))
        handle, view = self.streams[file].fileno(), buffer.numpy().data
        parts = range(0, len(view), CHUNK)
        for _ in self.threads.map(lambda at: fetch(handle, view[at : at + CHUNK], start + at, file), parts):
            pass

    def mapped(self, file: Path) -> mmap:
        """A file as memory, in pages that are read when they are touched. What is written there stays here."""
        if file not in self.maps:
            with file.open("rb") as stream:
                self.maps[file] = mmap(stream.fileno(), 0, access=ACCESS_COPY)
        return self.maps[file]

    def pickled(self, file: Path) -> Mapping[str, Tensor]:
        if file not in self.pickles:
            self.pickles[file] = unpickled(file)
        return self.pickles[file]

    def close(self) -> None:
        self.pickles.clear()
        self.stack.close()


def fetch(handle: int, view: memoryview, start: int, file: Path) -> None:
    while view:
        count = os.preadv(handle, [view], start)
        if not count:
            raise cut(file)
        view, start = view[count:], start + count


def cut(file: Path) -> UserError:
    return UserError(f"{file}: became shorter while it was read; download it again")


@dataclass(frozen=True)
class TensorMeta:
    """Where a tensor lies, and what is known of it before it is read."""

    file: Path
    shape: Shape
    dtype: torch.dtype

    def read(self, files: OpenFiles) -> Tensor:
        """The tensor, in memory of its own."""
        raise NotImplementedError

    def lend(self, files: OpenFiles) -> Tensor:
        """The tensor, in memory of its own or of the file."""
        return self.read(files)


@dataclass(frozen=True)
class TensorSlice(TensorMeta):
    """Bytes of a safetensors file."""

    start: int

    def read(self, files: OpenFiles) -> Tensor:
        tensor = torch.empty(self.shape, dtype=self.dtype)
        files.fill(tensor.reshape(-1).view(torch.uint8), self.file, self.start)
        return tensor

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def lend(self, files: OpenFiles) -> Tensor:
        if not self.size or self.start % self.dtype.itemsize or self in files.lent:
            return self.read(files)
        files.lent.add(self)  # once: who took it for good may write to it
        stop, whole = self.start + self.size, files.mapped(self.file)
        if len(whole) < stop:
            raise cut(self.file)
        part = memoryview(whole)[self.start : stop]
        # When nothing uses it any more, the pages that hold nothing else leave the memory of this process.
        first, last = -(-self.start // PAGESIZE) * PAGESIZE, stop // PAGESIZE * PAGESIZE
        if first < last:
            finalize(part, whole.madvise, MADV_DONTNEED, first, last - first).atexit = False
        return torch.frombuffer(part, dtype=torch.uint8).view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class TorchPickleTensor(TensorMeta):
    """A tensor in a file of `torch.save`, which is mapped, and where several may share their memory."""

    name: str

    def read(self, files: OpenFiles) -> Tensor:
        return files.pickled(self.file)[self.name].clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class RandomTensor(TensorMeta):
    """A tensor that is in no file yet: a head of fresh weights, as `reset` draws them. It would go into `file`."""

    seed: int
    std: float

    def read(self, files: OpenFiles) -> Tensor:
        return normal_init(self.shape, self.std, named_generator(self.seed, "head")).to(self.dtype)


class TensorReader:
    """Tensors of a checkpoint, one at a time."""

    def __init__(self, tensors: Mapping[str, TensorMeta]) -> None:
        self.tensors, self.files = tensors, OpenFiles()

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(self, *error: object) -> None:
        self.files.close()

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name].read(self.files)

    def lend(self, name: str) -> Tensor:
        """The tensor where it lies in the file, if it can be used there: to be copied, or taken for good."""
        return self.tensors[name].lend(self.files)


def read_header(file: Path) -> dict[str, TensorMeta]:
    """What a safetensors file holds. The library checks that header and length make sense before they are used."""
    try:
        with safe_open(file, framework="pt") as checked:
            checked.keys()
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: damaged or cut off ({error}); download it again") from error
    size, entries = raw_header(file)
    begin = LENGTH.size + size
    return {
        name: TensorSlice(file, tuple(e["shape"]), dtype(file, name, e["dtype"]), begin + e["data_offsets"][0])
        for name, e in entries.items()
        if name != "__metadata__"
    }


def raw_header(file: Path) -> tuple[int, dict[str, Any]]:
    """The length of a header that was found to be sound, and what it says."""
    with file.open("rb") as stream:
        (size,) = LENGTH.unpack(stream.read(LENGTH.size))
        return size, json.loads(stream.read(size))


def dtype(file: Path, name: str, kind: str) -> torch.dtype:
    if kind not in DTYPES:
        raise UserError(f"{file}: {name} is stored as {kind}, which is not known")
    return DTYPES[kind]


def read_pickle_header(file: Path) -> dict[str, TensorMeta]:
    tensors = unpickled(file)
    return {name: TorchPickleTensor(file, tuple(t.shape), t.dtype, name) for name, t in tensors.items()}


def unpickled(file: Path) -> Mapping[str, Tensor]:
    """The tensors of a file of `torch.save`. Nothing in it is run, whatever it asks for."""
    try:
        # Files of torch before 1.6 cannot be mapped.
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except BROKEN as error:
        told = str(error).partition("\n")[0]
        raise UserError(f"{file}: holds more than tensors, or is damaged ({told}); nothing of it was run") from error
    if not isinstance(found, dict) or not all(isinstance(n, str) and isinstance(t, Tensor) for n, t in found.items()):
        raise UserError(f"{file}: holds no tensors by name, so these are no weights of a model")
    return found


class SafetensorsWriter:
    """A safetensors file whose header is known before its tensors, which may come in any order, one at a time."""

    def __init__(
        self,
        file: Path,
        entries: Entries,
        like: Path | None = None,
        told: Mapping[str, str] = FORMAT,
        made: bool = False,
    ) -> None:
        """`like` is a file whose order and metadata are kept, to the byte if it holds just these tensors; without it
        the metadata are what is `told`. With `made` another process has made the file: several may write into it."""
        head = copied(like, entries) if like is not None else None
        head = head or laid_out(entries, told if like is None else read_metadata(like) | FORMAT)
        begin = LENGTH.size + len(head)
        entered = json.loads(head)
        self.places = {name: [begin + offset for offset in entered[name]["data_offsets"]] for name in entries}
        self.stream: BinaryIO = file.open("r+b" if made else "wb")
        if not made:
            self.stream.write(LENGTH.pack(len(head)) + head)
            self.stream.truncate(max((stop for _, stop in self.places.values()), default=begin))

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stream.close()

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        start, stop = self.places[name]
        assert tensor.nbytes == stop - start, f"{name}: {tensor.nbytes} bytes for {stop - start}"
        self.stream.seek(start)
        self.stream.write(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def copied(like: Path, entries: Entries) -> bytes | None:
    """The header of another file, if it would be just that of `entries`."""
    size, told = raw_header(like)
    if read_metadata(like).get("format") != FORMAT["format"]:
        return None
    same = {n: (tuple(e["shape"]), DTYPES.get(e["dtype"])) for n, e in told.items() if n != "__metadata__"}
    if same != dict(entries):
        return None
    with like.open("rb") as stream:
        stream.seek(LENGTH.size)
        return stream.read(size)


def read_metadata(file: Path) -> dict[str, str]:
    return raw_header(file)[1].get("__metadata__") or {}


def laid_out(entries: Entries, told: Mapping[str, str]) -> bytes:
    """A header with its tensors in the order of the safetensors library: the widest first, then by name."""
    order = list(DTYPES.values())[::-1]
    described: dict[str, Any] = {"__metadata__": told}
    offset = 0
    for name, (shape, kind) in sorted(entries.items(), key=lambda item: (order.index(item[1][1]), item[0])):
        size = torch.Size(shape).numel() * kind.itemsize
        described[name] = {"dtype": KINDS[kind], "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(described, ensure_ascii=False, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % LENGTH.size)
