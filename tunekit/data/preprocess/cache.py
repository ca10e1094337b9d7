"""Cache of preprocessed datasets: one directory per fingerprint, complete or absent, safe for concurrent processes.

Readers of an entry hold a shared lock, writers and removers an exclusive one. An entry is written to a temporary
directory next to it, synced, and renamed.
"""

import errno
import fcntl
import json
import os
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunekit.data.preprocess.tokenized_dataset import METADATA_FILE, TokenizedDataset, is_complete
from tunekit.distributed import worker_env
from tunekit.errors import UserError
from tunekit.kernels import cache_dir as store
from tunekit.system import format_bytes, free_bytes, fsync_path

OFF = "off"
LOCK, PARTIAL = ".lock", ".partial"
BuildFn = Callable[[Path], None]  # writes all files of an entry into a directory
LogFn = Callable[[str], None]


def cache_dir() -> Path | None:
    """Directory of the entries; None if the cache is off."""
    return None if os.environ.get(store.CACHE_VARIABLE) == OFF else store.cache_root() / "data"


def get_or_build(key: str | None, build: BuildFn, log: LogFn) -> TokenizedDataset:
    """Dataset of a key. Maps an existing entry, or builds it; of concurrent processes only one builds."""
    directory = cache_dir()
    if key is None or directory is None:
        return build_temporary(build)
    entry = directory / key
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = CacheLock(entry)
    except OSError as error:
        if is_complete(entry):  # an entry of another user, in a read-only cache
            return TokenizedDataset.open(entry)
        reason = os.strerror(error.errno or errno.EIO).lower()
        log(f"warning: {directory}: cannot cache preprocessed rows: {reason}. Set {store.CACHE_VARIABLE}.")
        return build_temporary(build)
    with ExitStack() as stack:
        stack.callback(lock.free)  # on an error: a caller that handles it must not keep the lock
        dataset = open_or_build(entry, lock, build, log)
        stack.pop_all()
        return dataset


def open_or_build(entry: Path, lock: "CacheLock", build: BuildFn, log: LogFn) -> TokenizedDataset:
    """Dataset of an entry, with a shared lock that is held as long as the dataset exists."""
    while True:
        if not lock.acquire_shared(wait=False):
            if not lock.is_same_run():
                log(f"waiting for another process that preprocesses the same rows ({entry})")
            lock.acquire_shared(wait=True)
        if is_complete(entry):
            os.utime(entry / METADATA_FILE)
            return TokenizedDataset.open(entry, lock)
        if lock.acquire_exclusive():
            if not is_complete(entry):
                publish_entry(entry, build)
        else:  # another process has the lock
            time.sleep(0.05)


def publish_entry(entry: Path, build: BuildFn) -> None:
    """Build an entry atomically. Removes what interrupted processes have left of it."""
    for path in (entry, *entry.parent.glob(f"{entry.name}*{PARTIAL}")):
        shutil.rmtree(path, ignore_errors=True)
    partial = entry.with_name(f"{entry.name}-{secrets.token_hex(4)}{PARTIAL}")
    try:
        with raise_disk_full(entry):
            partial.mkdir()
        build(partial)
        with raise_disk_full(entry):
            for file in (*partial.iterdir(), partial):
                fsync_path(file)
            partial.rename(entry)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def build_temporary(build: BuildFn) -> TokenizedDataset:
    """Dataset in a temporary directory.

    Its files are removed as soon as they are mapped, so that a killed process leaves none; the list of bad rows with
    the dataset.
    """
    with ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="tunekit-rows-"))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        build(directory)
        dataset = TokenizedDataset.open(directory)
        if dataset.summary.bad_rows is not None:
            for file in directory.iterdir():
                if file != dataset.summary.bad_rows:
                    file.unlink()
            weakref.finalize(dataset, stack.pop_all().close)
    return dataset


@contextmanager
def raise_disk_full(entry: Path) -> Iterator[None]:
    """Turn OSError into UserError."""
    try:
        yield
    except OSError as error:
        reason, free = os.strerror(error.errno or errno.EIO).lower(), format_bytes(free_bytes(entry))
        raise UserError(
            f"{entry.parent}: cannot write preprocessed rows: {reason} ({free} free). Free disk space "
            f"(`tune cache clear`), or set {store.CACHE_VARIABLE} to another directory."
        ) from error


class CacheLock:
    """File lock of a cache entry. Released by `free`, by garbage collection, or when the process ends."""

    def __init__(self, entry: Path) -> None:
        self.path = entry.with_name(entry.name + LOCK)
        self.file = self.path.open("a+")
        self.acquire_shared(wait=False)  # raises OSError on a file system without locks

    def acquire_shared(self, wait: bool) -> bool:
        """Acquire a shared lock. Return False if another process has an exclusive one and `wait` is False."""
        return self.acquire(fcntl.LOCK_SH if wait else fcntl.LOCK_SH | fcntl.LOCK_NB)

    def acquire_exclusive(self) -> bool:
        """Try to acquire the exclusive lock. On failure, no lock is held."""
        acquired = self.acquire(fcntl.LOCK_EX | fcntl.LOCK_NB)
        if acquired:
            self.file.truncate(0)
            self.file.write(worker_env.rendezvous_id())
            self.file.flush()
        return acquired

    def is_same_run(self) -> bool:
        """Whether the owner of the exclusive lock is a rank of the same run: waiting for it is expected."""
        self.file.seek(0)
        return worker_env.is_worker() and self.file.read() == worker_env.rendezvous_id()

    def acquire(self, operation: int) -> bool:
        """Call flock until it locks the current file of this path. Return False if it would block."""
        while True:
            try:
                fcntl.flock(self.file, operation)
            except BlockingIOError:
                return False
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self.file.fileno()), self.path.stat()):
                    return True
            self.file = self.path.open("a+")  # the previous owner has removed the file

    def free(self) -> None:
        """Release the lock."""
        self.file.close()


@dataclass(frozen=True)
class CacheEntry:
    """A complete cache entry. `size` is in bytes, `used` the time of the last use in seconds since 1970."""

    path: Path
    metadata: dict[str, Any]
    size: int
    used: float

    @property
    def key(self) -> str:
        return self.path.name


def list_entries() -> list[CacheEntry]:
    """All complete entries, most recently used first."""
    entries = []
    for path in entry_dirs():
        if path.suffix != PARTIAL and is_complete(path):
            file = path / METADATA_FILE
            with suppress(FileNotFoundError):  # another process has removed it
                metadata, used = json.loads(file.read_text("utf-8")), file.stat().st_mtime
                entries.append(CacheEntry(path, metadata, dir_bytes(path), used))
    return sorted(entries, key=lambda entry: entry.used, reverse=True)


def entry_dirs() -> Iterator[Path]:
    """Directories in the cache, of complete and unfinished entries."""
    root = cache_dir()
    return (path for path in sorted(root.iterdir()) if path.is_dir()) if root and root.is_dir() else iter(())


def dir_bytes(path: Path) -> int:
    """Bytes of the files in a directory. Another process may move or remove them meanwhile."""
    size = 0
    with suppress(FileNotFoundError):
        for file in path.iterdir():
            size += file.stat().st_size
    return size


def list_unfinished() -> list[Path]:
    """Directories of entries that are incomplete: of interrupted or of running processes."""
    return [path for path in entry_dirs() if path.suffix == PARTIAL or not is_complete(path)]


def remove_entry(path: Path) -> bool:
    """Delete a complete or unfinished entry. Return False if a process uses it."""
    lock = CacheLock(path.with_name(path.name.partition("-")[0]))
    try:
        if not lock.acquire_exclusive():
            return False
        with suppress(FileNotFoundError):  # another process has removed or completed it
            shutil.rmtree(path)
        lock.path.unlink()
        return True
    finally:
        lock.free()
