"""Folders and small files that appear whole or not at all, whatever instant the process or the disk gives up.

A folder is written beside its place, synced, renamed and then marked. What carries no mark is not there for readers.
The mark holds a checksum of every file.
"""

import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType

from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.system import format_bytes, free_bytes, fsync_path

MARK = "complete"
PARTIAL, PREVIOUS = ".partial", ".previous"
CHUNK = 2**24
ALL = slice(None)
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}


class AtomicDir:  # noqa: N801 (it reads like `contextlib.suppress`)
    """`with whole(folder) as partial:` write into `partial`; at the end `folder` is there, complete and on the disk.

    Whatever stood in `folder` before stays until the new one is marked. A write that the disk refuses is a UserError.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.partial = folder, sibling_path(folder, PARTIAL)

    def __enter__(self) -> Path:
        try:
            remove_partial(self.folder)
            self.partial.mkdir(parents=True)
        except OSError as error:
            raise write_error(self.folder, error) from error
        return self.partial

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            try:
                commit_dir(self.partial, self.folder)
            except OSError as failure:
                with suppress(OSError):
                    remove_partial(self.folder)
                raise write_error(self.folder, failure) from failure
        else:
            with suppress(OSError):
                remove_dir(self.partial)
            cause = find_disk_error(error)
            if cause is not None:
                raise write_error(self.folder, cause) from error


class SharedAtomicDir:  # noqa: N801
    """`whole` for all ranks: they write into one folder, which the main process begins and ends.

    What stops one of them, a UserError or the disk, is an error of all and leaves nothing. It must come where the
    others exchange nothing more before they leave the block.
    """

    def __init__(self, folder: Path, run: DistributedContext) -> None:
        self.folder, self.run, self.own = folder, run, AtomicDir(folder)

    def __enter__(self) -> Path:
        return self.run.shared(self.own.__enter__)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and find_disk_error(error) is None and not isinstance(error, UserError):
            self.clear()
            return  # the process ends, and the launcher ends the others
        try:
            self.run.together(lambda: self.judge(error))
            sums = self.run.gather(self.run.together(self.sums))
            self.run.shared(lambda: self.end(dict(sorted(pair for one in sums for pair in one.items()))))
        finally:
            self.clear()

    def clear(self) -> None:
        """Nothing half written stays."""
        if self.run.is_main:
            with suppress(OSError):
                remove_partial(self.folder)

    def judge(self, error: BaseException | None) -> None:
        """Why this rank could not write, as a UserError."""
        if isinstance(error, UserError):
            raise error
        if error is not None and (cause := find_disk_error(error)) is not None:
            raise write_error(self.folder, cause) from error

    def sums(self) -> dict[str, int]:
        """Checksums of a share of the files."""
        with wrap_write_errors(self.folder):
            return checksums(self.own.partial, slice(self.run.rank, None, self.run.size))

    def end(self, sums: Mapping[str, int]) -> None:
        with wrap_write_errors(self.folder):
            commit_dir(self.own.partial, self.folder, sums)


def is_complete(folder: Path) -> bool:
    """Whether everything that was to be written into the folder is in it."""
    return (folder / MARK).is_file()


def find_complete_dir(folder: Path) -> Path | None:
    """Where the whole version of a folder lies right now, for readers that do not own it. None if there is none."""
    return next((place for place in (folder, sibling_path(folder, PREVIOUS)) if is_complete(place)), None)


def remove_partial(folder: Path) -> None:
    """Clear up after a writer that was cut off: the newest whole version stands in `folder`, nothing beside it.

    Only for the process that owns the folder: it would pull it from under another one that is writing.
    """
    previous = sibling_path(folder, PREVIOUS)
    remove_dir(sibling_path(folder, PARTIAL))
    if is_complete(previous) and not is_complete(folder):
        remove_dir(folder)
        previous.rename(folder)
        fsync_path(folder.parent)
    remove_dir(previous)


def remove_dir(folder: Path) -> None:
    """Delete a folder, its mark first: half of a folder must not look whole."""
    if is_complete(folder):
        (folder / MARK).unlink()
        fsync_path(folder)
    if folder.is_dir():
        shutil.rmtree(folder)


def find_corrupt_file(folder: Path, share: slice = ALL) -> Path | None:
    """A file of a whole folder that is no longer what was written, or is gone. None if all are as they were.

    With `share` only some of its files are read.
    """
    try:
        sums = json.loads((folder / MARK).read_text(encoding="utf-8"))
    except ValueError:
        return folder / MARK
    some = [*sums.items()][share]
    return next((folder / n for n, s in some if not (folder / n).is_file() or checksum(folder / n) != s), None)


def write_text_atomic(path: Path, text: str) -> None:
    """Replace a small file in one step; its folder is made if it is not there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text)
    except OSError as error:
        with suppress(OSError):  # a disk that is read-only refuses this too
            sibling_path(path, PARTIAL).unlink()
        raise write_error(path, error) from error


def check_writable(path: Path) -> None:
    """Refuse a file that could not be written, before anything is computed for it. Its folder is made."""
    if path.is_dir():
        raise UserError(f"cannot write {path}: it is a folder; name a file in it")
    with wrap_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path.parent):
            pass


def check_free_space(folder: Path, size: int) -> None:
    """Refuse before the first byte is written if the disk has no room for `size` bytes more.

    `folder` is where they will be, or what `whole` gave to write into.
    """
    if size > free_bytes(folder):
        folder = final_path(folder)
        raise UserError(
            f"cannot write {folder}: it takes {format_bytes(size)} and {format_bytes(free_bytes(folder))} are free; "
            f"{last_complete_state(folder)}; make room and start again"
        )


def write_error(path: Path, error: OSError) -> UserError:
    """What to tell when the disk refuses to take `path`."""
    assert error.errno is not None
    reason, path = os.strerror(error.errno).lower(), final_path(path)
    return UserError(
        f"cannot write {path}: {reason} ({format_bytes(free_bytes(path))} free); {last_complete_state(path)}; "
        "mend that and start again"
    )


class DeferredError:
    """What a rank does while others wait for it in the next exchange: its first UserError is kept, and told when all
    are through. Behind it nothing more is done."""

    def __init__(self) -> None:
        self.error: UserError | None = None

    def __call__(self, act: Callable[[], object]) -> None:
        if self.error is None:
            try:
                act()
            except UserError as error:
                self.error = error

    def tell(self) -> None:
        if self.error is not None:
            raise self.error


@contextmanager
def wrap_write_errors(path: Path) -> Iterator[None]:
    """Whatever the disk refuses in here is told as a refusal of `path`."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else find_disk_error(error)
        if cause is None:
            raise
        raise write_error(path, cause) from error


def find_disk_error(error: BaseException) -> OSError | None:
    """The refusal of the disk behind an exception, however it was wrapped on its way."""
    for link in chain(error):
        if isinstance(link, OSError) and link.errno in FULL:
            return link
        found = re.search(r"\(os error (\d+)\)", str(link))  # safetensors writes in Rust
        if found and int(found[1]) in FULL:
            return OSError(int(found[1]), str(link))
    return None


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and all that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def last_complete_state(path: Path) -> str:
    """What a reader still finds near `path`."""
    marks = [*path.parent.glob(f"*/{MARK}"), *path.parent.glob(f"*/*/{MARK}")]
    if not marks:
        return "nothing old was touched"
    newest = max(marks, key=lambda mark: mark.stat().st_mtime)
    return f"nothing old was touched, the last complete state is {newest.parent}"


def replace_text(path: Path, text: str) -> None:
    partial = sibling_path(path, PARTIAL)
    partial.write_text(text, encoding="utf-8")
    fsync_path(partial)
    partial.replace(path)
    fsync_path(path.parent)


def commit_dir(partial: Path, folder: Path, sums: Mapping[str, int] | None = None) -> None:
    """`sums`: the checksums of all files, if they are known."""
    sums = sums or checksums(partial)
    make_readable(partial)
    sync_tree(partial)
    if folder.exists():
        folder.rename(sibling_path(folder, PREVIOUS))
    partial.rename(folder)
    fsync_path(folder.parent)
    replace_text(folder / MARK, json.dumps(dict(sums)))
    remove_dir(sibling_path(folder, PREVIOUS))


def checksums(folder: Path, some: slice = ALL) -> dict[str, int]:
    """Those of all files in a folder, or of some of them."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): checksum(file) for file in files[some]}


def checksum(file: Path) -> int:
    value = 0
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            value = zlib.crc32(chunk, value)
    return value


def make_readable(folder: Path) -> None:
    """Let files be read by whom the folder is for: safetensors writes them for their owner alone."""
    mode = folder.stat().st_mode & 0o666
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(mode)


def sync_tree(folder: Path) -> None:
    for root, _, files in os.walk(folder, topdown=False):
        for name in files:
            fsync_path(Path(root, name))
        fsync_path(Path(root))


def final_path(path: Path) -> Path:
    """The folder that is there in the end."""
    return path.with_name(path.name.removesuffix(PARTIAL))


def sibling_path(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)
