"""Atomic writes of directories and small files, safe against crashes and disk errors at any point.

A directory is written under a temporary name, synced, renamed and then marked as complete. Readers ignore a directory
without the marker file, which contains a checksum of every file.
"""

import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile

from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.system import format_binary_bytes, format_bytes, free_bytes, fsync_path

MARK = "complete"
PARTIAL, PREVIOUS = ".partial", ".previous"
CHUNK = 2**24
ALL = slice(None)
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}


class AtomicDir:
    """`with AtomicDir(folder) as partial:` write into `partial`, which is renamed to `folder` at the end.

    An existing `folder` is kept until the new one is complete. Disk errors are raised as UserError. With `run`, all
    ranks write into one directory, and a UserError or disk error of one rank, which must occur after the last
    collective of the block, is raised on all ranks.
    """

    def __init__(self, folder: Path, dist: DistributedContext | None = None) -> None:
        self.folder, self.partial = folder, sibling_path(folder, PARTIAL)
        self.dist = dist or DistributedContext.single_process()

    def __enter__(self) -> Path:
        self.dist.run_on_main(self.create)
        return self.partial

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None and find_disk_error(error) is None and not isinstance(error, UserError):
            self.clean_up()
            return  # this process ends, and the launcher stops the others
        try:
            self.dist.run_on_all(partial(self.raise_write_error, error))
            sums = self.dist.all_gather_objects(self.dist.run_on_all(self.local_checksums))
            all_sums = sorted(pair for rank_sums in sums for pair in rank_sums.items())
            self.dist.run_on_main(partial(self.commit, dict(all_sums)))
        finally:
            self.clean_up()

    def create(self) -> None:
        with wrap_write_errors(self.folder):
            remove_partial(self.folder)
            self.partial.mkdir(parents=True)

    def clean_up(self) -> None:
        """Delete the partial directory."""
        if self.dist.is_main_process:
            with suppress(OSError):
                remove_partial(self.folder)

    def raise_write_error(self, error: BaseException | None) -> None:
        """Raise the error of this rank as a UserError, if it has one."""
        if isinstance(error, UserError):
            raise error
        if error is not None and (cause := find_disk_error(error)) is not None:
            raise write_error(self.folder, cause) from error

    def local_checksums(self) -> dict[str, int]:
        """Checksums of the files that are assigned to this rank."""
        with wrap_write_errors(self.folder):
            return checksums(self.partial, slice(self.dist.rank, None, self.dist.world_size))

    def commit(self, sums: Mapping[str, int]) -> None:
        with wrap_write_errors(self.folder):
            commit_dir(self.partial, self.folder, sums)


def is_complete(folder: Path) -> bool:
    """Whether a directory was written completely."""
    return (folder / MARK).is_file()


def find_complete_dir(folder: Path) -> Path | None:
    """Current path of the complete version of a directory, for concurrent readers; None if none exists."""
    return next((path for path in (folder, sibling_path(folder, PREVIOUS)) if is_complete(path)), None)


def remove_partial(folder: Path) -> None:
    """Clean up after an interrupted write. Restores the newest complete version to `folder`.

    Only the process that owns the directory may call this: it deletes what another one is writing.
    """
    previous = sibling_path(folder, PREVIOUS)
    remove_dir(sibling_path(folder, PARTIAL))
    if is_complete(previous) and not is_complete(folder):
        remove_dir(folder)
        previous.rename(folder)
        fsync_path(folder.parent)
    remove_dir(previous)


def remove_dir(folder: Path) -> None:
    """Delete a directory, its marker first, so that a partly deleted directory does not look complete."""
    if is_complete(folder):
        (folder / MARK).unlink()
        fsync_path(folder)
    if folder.is_dir():
        shutil.rmtree(folder)


def find_corrupt_file(folder: Path, subset: slice = ALL) -> Path | None:
    """Return a missing or changed file of a complete directory, by checksum; None if all files are intact.

    `subset` selects the files to read.
    """
    sums = read_mark(folder)
    if sums is None:
        return folder / MARK
    files = {folder / name: expected for name, expected in [*sums.items()][subset]}
    return next((file for file, value in files.items() if not is_intact(file, value)), None)


def is_intact(file: Path, expected: int) -> bool:
    """Whether a file can be read and has this checksum."""
    try:
        return file.is_file() and checksum(file) == expected
    except OSError:
        return False


def find_missing_file(folder: Path) -> Path | None:
    """Return a missing file of a complete directory; None if all files exist."""
    return next((folder / name for name in read_mark(folder) or {MARK: 0} if not (folder / name).is_file()), None)


def read_mark(folder: Path) -> dict[str, int] | None:
    """Checksums of the files of a complete directory, from its marker; None if that is corrupt."""
    try:
        return {**json.loads((folder / MARK).read_text(encoding="utf-8"))}
    except (ValueError, TypeError, RecursionError):  # not JSON, not an object, nested too deeply
        return None


def write_text_atomic(path: Path, text: str) -> None:
    """Replace a small file atomically. Creates its directory."""
    with atomic_file(path) as partial_file:
        partial_file.write_text(text, encoding="utf-8")


def resolve_file(path: Path) -> Path:
    """A path, or the file that it links to. Raise UserError for a directory, device or pipe, which would be lost."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: is {'a directory' if path.is_dir() else 'a device or a pipe'}. Specify a file.")
    return path.resolve() if path.is_symlink() else path


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path that is renamed to `path` at the end. Disk errors are raised as UserError."""
    path = resolve_file(path)
    partial_file = sibling_path(path, PARTIAL)
    with wrap_write_errors(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            yield partial_file
            replace_file(partial_file, path)
        finally:
            with suppress(OSError):  # also fails on a read-only disk
                partial_file.unlink()


def check_writable(path: Path) -> None:
    """Raise UserError if a file cannot be written. Call before the computation. Creates the directory of the file."""
    path = resolve_file(path)
    with wrap_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path.parent):
            pass


def check_free_space(folder: Path, size: int) -> None:
    """Raise UserError if the disk has fewer than `size` free bytes. `folder` is the final or the partial directory."""
    if size > free_bytes(folder):
        folder = final_path(folder)
        raise UserError(
            f"{folder}: not enough disk space ({format_binary_bytes(size)} needed, "
            f"{format_binary_bytes(free_bytes(folder))} free). "
            f"{last_complete_state(folder)} Free disk space and rerun."
        )


def write_error(path: Path, error: OSError) -> UserError:
    """UserError for a failed write to `path`."""
    assert error.errno is not None
    reason, path = os.strerror(error.errno).lower(), final_path(path)
    if error.errno == errno.ENOENT:
        return UserError(f"{path}: cannot be written: no such directory. Create it, or use another path.")
    return UserError(
        f"{path}: write failed, {reason} ({format_bytes(free_bytes(path))} free). {last_complete_state(path)} "
        "Fix the disk and rerun."
    )


@contextmanager
def wrap_write_errors(path: Path) -> Iterator[None]:
    """Turn disk errors inside the block into a UserError about `path`."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else find_disk_error(error)
        if cause is None:
            raise
        raise write_error(path, cause) from error


def find_disk_error(error: BaseException) -> OSError | None:
    """Return the disk error that caused an exception, also if other exceptions wrap it."""
    for cause in exception_chain(error):
        if isinstance(cause, OSError) and cause.errno in DISK_ERRORS:
            return cause
        match = re.search(r"\(os error (\d+)\)", str(cause))  # safetensors writes in Rust
        if match and int(match[1]) in DISK_ERRORS:
            return OSError(int(match[1]), str(cause))
    return None


def exception_chain(error: BaseException | None) -> Iterator[BaseException]:
    """Iterate over an exception and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def last_complete_state(path: Path) -> str:
    """Sentence about the newest complete directory near `path`."""
    markers = [*path.parent.glob(f"*/{MARK}"), *path.parent.glob(f"*/*/{MARK}")]
    if not markers:
        return "Existing files are unchanged."
    newest = max(markers, key=lambda marker: marker.stat().st_mtime)
    return f"Existing files are unchanged; the last complete state is {newest.parent}."


def replace_file(partial_file: Path, path: Path) -> None:
    """Move a file to its final path, after its contents are on disk."""
    fsync_path(partial_file)
    partial_file.replace(path)
    fsync_path(path.parent)


def commit_dir(partial_dir: Path, folder: Path, sums: Mapping[str, int]) -> None:
    """Move a partial directory to its final path and mark it. `sums` are the checksums of all files."""
    make_readable(partial_dir)
    sync_tree(partial_dir)
    if folder.exists():
        folder.rename(sibling_path(folder, PREVIOUS))
    partial_dir.rename(folder)
    fsync_path(folder.parent)
    partial_mark = sibling_path(folder / MARK, PARTIAL)
    partial_mark.write_text(json.dumps(dict(sums)), encoding="utf-8")
    replace_file(partial_mark, folder / MARK)
    remove_dir(sibling_path(folder, PREVIOUS))


def checksums(folder: Path, subset: slice = ALL) -> dict[str, int]:
    """CRC-32 checksums of the files in a directory, or of a subset of them."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): checksum(file) for file in files[subset]}


def checksum(file: Path) -> int:
    value = 0
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            value = zlib.crc32(chunk, value)
    return value


def make_readable(folder: Path) -> None:
    """Give files the read permissions of the directory. safetensors creates files for their owner only."""
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
    """Final path of a partial directory."""
    return path.with_name(path.name.removesuffix(PARTIAL))


def sibling_path(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
