"""Where prepared rows are kept: a folder for each key, whole or not there, however many processes want it at once.

Who reads an entry holds a shared lock on it, who writes or removes one an exclusive lock. An entry is written beside
its place, synced and renamed.
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
from contextlib import ExitStack, contextmanager
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
Make = Callable[[Path], None]  # writes all files of an entry into a folder
Tell = Callable[[str], None]


def cache_dir() -> Path | None:
    """Where entries lie; None if nothing is to be kept."""
    return None if os.environ.get(store.HOME) == OFF else store.cache_root() / "data"


def get_or_build(key: str | None, make: Make, tell: Tell) -> TokenizedDataset:
    """The documents of a key: mapped if they are there, else made, by one process however many ask."""
    place = cache_dir()
    if key is None or place is None:
        return temporary(make)
    entry = place / key
    try:
        place.mkdir(parents=True, exist_ok=True)
        lock = CacheLock(entry)
    except OSError as error:
        if is_complete(entry):  # what others have prepared, and nobody may write to
            return TokenizedDataset.open(entry)
        reason = os.strerror(error.errno or errno.EIO).lower()
        tell(f"prepared rows are not kept: cannot write {place} ({reason}); {store.HOME} names another folder")
        return temporary(make)
    with ExitStack() as stack:
        stack.callback(lock.free)  # a mistake that somebody catches would hold it
        found = shared(entry, lock, make, tell)
        stack.pop_all()
        return found


def shared(entry: Path, lock: "CacheLock", make: Make, tell: Tell) -> TokenizedDataset:
    """An entry that is read here, and that nobody removes as long as its documents are held."""
    while True:
        if not lock.share(wait=False):
            if not lock.near():
                tell(f"waiting for another process that prepares the same rows ({entry})")
            lock.share(wait=True)
        if is_complete(entry):
            os.utime(entry / METADATA_FILE)
            return TokenizedDataset.open(entry, lock)
        if lock.own():
            if not is_complete(entry):
                publish(entry, make)
        else:  # somebody else has begun, or looks just now
            time.sleep(0.05)


def publish(entry: Path, make: Make) -> None:
    """Make an entry, whole or not at all. What others left half done here goes first."""
    for left in (entry, *entry.parent.glob(f"{entry.name}*{PARTIAL}")):
        shutil.rmtree(left, ignore_errors=True)
    partial = entry.with_name(f"{entry.name}-{secrets.token_hex(4)}{PARTIAL}")
    try:
        with raise_disk_full(entry):
            partial.mkdir()
        make(partial)
        with raise_disk_full(entry):
            for file in (*partial.iterdir(), partial):
                fsync_path(file)
            partial.rename(entry)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def temporary(make: Make) -> TokenizedDataset:
    """Documents in a folder that goes with them."""
    with ExitStack() as stack:
        place = Path(tempfile.mkdtemp(prefix="tunekit-rows-"))
        stack.callback(shutil.rmtree, place, ignore_errors=True)
        make(place)
        documents = TokenizedDataset.open(place)
        weakref.finalize(documents, stack.pop_all().close)
    return documents


@contextmanager
def raise_disk_full(place: Path, wanted: Callable[[], float | None] = lambda: None) -> Iterator[None]:
    """UserError if the disk does not take an entry; `wanted` tells what all of it would have needed, in bytes."""
    try:
        yield
    except OSError as error:
        reason, size = os.strerror(error.errno or errno.EIO).lower(), wanted()
        room = format_bytes(free_bytes(place)) + " free"
        room += "" if size is None else f", about {format_bytes(size)} wanted"
        raise UserError(
            f"cannot write prepared rows to {place.parent}: {reason} ({room}); make room (`tune cache clear`), or "
            f"name another folder as {store.HOME}"
        ) from error


class CacheLock:
    """What processes agree by on who may do what with an entry. It ends with its process, or when it is let go."""

    def __init__(self, entry: Path) -> None:
        self.path = entry.with_name(entry.name + LOCK)
        self.file = self.path.open("a+")
        self.share(wait=False)  # OSError here and now, where a file system has no locks

    def share(self, wait: bool) -> bool:
        return self.take(fcntl.LOCK_SH if wait else fcntl.LOCK_SH | fcntl.LOCK_NB)

    def own(self) -> bool:
        """Alone, at once; if somebody else has a share, no lock is held any more."""
        taken = self.take(fcntl.LOCK_EX | fcntl.LOCK_NB)
        if taken:
            self.file.truncate(0)
            self.file.write(worker_env.rendezvous_id())
            self.file.flush()
        return taken

    def near(self) -> bool:
        """Whether the one who has it is of the same run: the others wait for that one in any case."""
        return worker_env.is_worker() and self.said() == worker_env.rendezvous_id()

    def said(self) -> str:
        self.file.seek(0)
        return self.file.read()

    def take(self, kind: int) -> bool:
        while True:
            try:
                fcntl.flock(self.file, kind)
            except BlockingIOError:
                return False
            if self.path.exists() and os.path.samestat(os.fstat(self.file.fileno()), self.path.stat()):
                return True
            self.file = self.path.open("a+")  # who had it has removed the file

    def free(self) -> None:
        self.file.close()


@dataclass(frozen=True)
class CacheEntry:
    """Prepared rows that are kept: `size` in bytes, `used` and `made` in seconds since 1970."""

    path: Path
    about: dict[str, Any]
    size: int
    used: float

    @property
    def key(self) -> str:
        return self.path.name


def list_entries() -> list[CacheEntry]:
    """All that is kept, what was used last first."""
    found = [entry(path) for path in inside() if path.suffix != PARTIAL and is_complete(path)]
    return sorted(found, key=lambda entry: entry.used, reverse=True)


def entry(path: Path) -> CacheEntry:
    about = json.loads((path / METADATA_FILE).read_text("utf-8"))
    return CacheEntry(path, about, dir_bytes(path), (path / METADATA_FILE).stat().st_mtime)


def inside() -> Iterator[Path]:
    place = cache_dir()
    return (path for path in sorted(place.iterdir()) if path.is_dir()) if place and place.is_dir() else iter(())


def dir_bytes(path: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(file.stat().st_size for file in path.iterdir())


def list_unfinished() -> list[Path]:
    """What was never finished: by a process that was killed, or by one that is at it."""
    return [path for path in inside() if path.suffix == PARTIAL or not is_complete(path)]


def remove_entry(path: Path) -> bool:
    """Delete an entry, or half of one, unless a process reads or writes it."""
    lock = CacheLock(path.with_name(path.name.partition("-")[0]))
    try:
        if not lock.own():
            return False
        shutil.rmtree(path)
        lock.path.unlink()
        return True
    finally:
        lock.free()
