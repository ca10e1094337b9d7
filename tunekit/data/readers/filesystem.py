"""The bytes of a file, wherever it lies and however it is packed."""

import gzip
import hashlib
import io
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tunekit.data.readers.row_reader import FileOffset, RowChunk
from tunekit.errors import UserError

SEGMENT = 2**26  # bytes of a large file that are hashed in one thread
EDGE = 2**20  # bytes at both ends of a file that stand for all of it
# What reading raises; the last two, for packed data that ends early or is damaged.
TROUBLE = (OSError, EOFError, zlib.error)


def read_error(where: str, error: Exception) -> UserError:
    """A line on why a file cannot be read."""
    told = error.strerror if isinstance(error, OSError) else None
    return UserError(f"{where}: cannot be read: {told or ' '.join(str(error).split()) or type(error).__name__}")


class DataFile(Protocol):
    """A file that can be opened again and again. Whoever reads tells what goes wrong (`TROUBLE`) with its place."""

    @property
    def name(self) -> str:
        """How messages call it."""
        ...

    def open(self) -> io.BufferedReader: ...

    def digest(self, whole: bool) -> bytes:
        """A hash of its bytes; of what tells them from others at little cost, if not `whole`."""
        ...


@dataclass(frozen=True)
class LocalFile:
    """A file of this machine."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    def open(self) -> io.BufferedReader:
        return io.BufferedReader(io.FileIO(self.path), EDGE)

    def digest(self, whole: bool) -> bytes:
        try:
            size = self.path.stat().st_size
            starts = range(0, size, SEGMENT) if whole else sorted({0, max(size - EDGE, 0)})
            with ThreadPoolExecutor() as threads:
                parts = list(threads.map(lambda start: self.segment(start, SEGMENT if whole else EDGE), starts))
        except OSError as error:
            raise read_error(self.name, error) from None
        return hashlib.blake2b(b"".join([size.to_bytes(8), *parts]), digest_size=16).digest()

    def segment(self, start: int, length: int) -> bytes:
        found = hashlib.blake2b(digest_size=16)
        with self.path.open("rb", 0) as file:
            file.seek(start)
            while length > 0 and (block := file.read(min(length, EDGE))):
                found.update(block)
                length -= len(block)
        return found.digest()


@dataclass(frozen=True)
class CompressedFile:
    """A compressed file, read as what is packed in it. To go on in its middle, all before is unpacked once more."""

    file: DataFile
    unpack: Callable[[io.BufferedReader], io.BufferedReader]

    @property
    def name(self) -> str:
        return self.file.name

    def open(self) -> io.BufferedReader:
        return self.unpack(self.file.open())

    def digest(self, whole: bool) -> bytes:
        return self.file.digest(whole)


class GzipFile(gzip.GzipFile):
    """Closes the file that it reads from, too."""

    def __init__(self, packed: io.BufferedReader) -> None:
        super().__init__(fileobj=packed)
        self.packed = packed

    def close(self) -> None:
        super().close()
        self.packed.close()


def open_gzip(file: io.BufferedReader) -> io.BufferedReader:
    return io.BufferedReader(GzipFile(file), EDGE)  # type: ignore[arg-type]


@dataclass(frozen=True)
class RowFile:
    """A file of rows. It is read to know how many there are, where its kind does not tell."""

    file: DataFile

    def count(self, most: int | None) -> int:
        """Rows, counted up to `most`."""
        count = 0
        for chunk in self.chunks(FileOffset()):
            count += chunk.count
            if most is not None and count >= most:
                return most
        return count

    def chunks(self, place: FileOffset) -> Iterator[RowChunk]:
        raise NotImplementedError

    def digest(self, whole: bool) -> bytes:
        return self.file.digest(whole)


def skip_bytes(file: io.BufferedReader, name: str, count: int) -> None:
    """Go on by so many bytes, reading them where there is no other way: what is packed cannot be jumped over."""
    try:
        if file.seekable():
            file.seek(count, io.SEEK_CUR)
            return
        while count > 0 and (block := file.read(min(count, EDGE))):
            count -= len(block)
    except TROUBLE as error:
        raise read_error(name, error) from None
