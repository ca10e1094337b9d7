"""Interface of data files, and its implementations for local and compressed files."""

import gzip
import hashlib
import io
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tunekit.data.readers.row_reader import FileShard
from tunekit.errors import UserError

SEGMENT_BYTES = 2**26  # bytes that one thread hashes at a time
BLOCK_BYTES = 2**20  # read buffer; also the bytes at both ends of a file that are hashed if `full` is not set
# Errors of read(). The last two are for truncated or corrupt compressed data.
READ_ERRORS = (OSError, EOFError, zlib.error)


def read_error(where: str, error: Exception) -> UserError:
    """Return a one-line UserError for a failed read."""
    reason = error.strerror if isinstance(error, OSError) else None
    return UserError(f"{where}: cannot read: {reason or ' '.join(str(error).split()) or type(error).__name__}")


@contextmanager
def wrap_read_errors(where: str) -> Iterator[None]:
    """Turn READ_ERRORS into UserErrors."""
    try:
        yield
    except READ_ERRORS as error:
        raise read_error(where, error) from None


class DataFile(Protocol):
    """A file that can be opened repeatedly. Callers convert errors with `wrap_read_errors`."""

    @property
    def name(self) -> str:
        """Path or URL for error messages."""
        ...

    def open(self) -> io.BufferedReader: ...

    def digest(self, full: bool) -> bytes:
        """Hash of the content if `full`, otherwise of properties that are cheap to read."""
        ...


@dataclass(frozen=True)
class LocalFile:
    """A file in a local filesystem."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    def open(self) -> io.BufferedReader:
        return io.BufferedReader(io.FileIO(self.path), BLOCK_BYTES)

    def digest(self, full: bool) -> bytes:
        with wrap_read_errors(self.name), ThreadPoolExecutor() as threads:
            size, length = self.path.stat().st_size, SEGMENT_BYTES if full else BLOCK_BYTES
            starts = range(0, size, SEGMENT_BYTES) if full else sorted({0, max(size - BLOCK_BYTES, 0)})
            hashes = list(threads.map(lambda start: self.hash_segment(start, length), starts))
        return hashlib.blake2b(b"".join([size.to_bytes(8), *hashes]), digest_size=16).digest()

    def hash_segment(self, start: int, length: int) -> bytes:
        hasher = hashlib.blake2b(digest_size=16)
        with self.path.open("rb", 0) as file:
            file.seek(start)
            while length > 0 and (block := file.read(min(length, BLOCK_BYTES))):
                hasher.update(block)
                length -= len(block)
        return hasher.digest()


@dataclass(frozen=True)
class CompressedFile:
    """A compressed file, read as its decompressed content. Resuming decompresses everything before the position."""

    file: DataFile
    decompress: Callable[[io.BufferedReader], io.BufferedReader]

    @property
    def name(self) -> str:
        return self.file.name

    def open(self) -> io.BufferedReader:
        return self.decompress(self.file.open())

    def digest(self, full: bool) -> bytes:
        return self.file.digest(full)


class GzipFile(gzip.GzipFile):
    """A gzip file that also closes the compressed file."""

    def __init__(self, compressed: io.BufferedReader) -> None:
        super().__init__(fileobj=compressed)
        self.compressed = compressed

    def close(self) -> None:
        super().close()
        self.compressed.close()


def open_gzip(file: io.BufferedReader) -> io.BufferedReader:
    return io.BufferedReader(GzipFile(file), BLOCK_BYTES)  # type: ignore[arg-type]


@dataclass(frozen=True)
class RowFile(FileShard):
    """Base class of the readers of data files."""

    file: DataFile

    def digest(self, full: bool) -> bytes:
        return self.file.digest(full)


def skip_bytes(file: io.BufferedReader, name: str, count: int) -> None:
    """Skip bytes. Files that are not seekable, such as compressed ones, are read instead."""
    with wrap_read_errors(name):
        if file.seekable():
            file.seek(count, io.SEEK_CUR)
            return
        while count > 0 and (block := file.read(min(count, BLOCK_BYTES))):
            count -= len(block)
