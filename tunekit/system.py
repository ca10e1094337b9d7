"""Services of the operating system, without torch: processor, disk."""

import gc
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

from tunekit.errors import UserError

CPU_INFO = Path("/proc/cpuinfo")
# Device files of NVIDIA, AMD and Intel GPUs, and of GPUs in WSL
GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dri", "/dev/dxg")


def read_utf8(path: Path) -> str:
    """Text of a file, without a byte order mark. Raises UserError for another encoding, such as UTF-16."""
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}). Save it as UTF-8.") from None


def may_have_gpu() -> bool:
    """Whether torch may find an accelerator."""
    return sys.platform != "linux" or any(Path(name).exists() for name in GPU_FILES)


@contextmanager
def imports_without_gc() -> Iterator[None]:
    """Import modules without garbage collection, and exclude what they hold from later collections.

    Collections took 0.9 of the 3.7 s of `tune validate`. Nothing is excluded if all modules were imported before.
    """
    was_enabled, num_modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_modules:
            gc.freeze()
        if was_enabled:
            gc.enable()


def read_cpu_info() -> list[str]:
    """Lines of Linux on the first core, with their ends; empty on other systems."""
    if not CPU_INFO.is_file():
        return []
    with CPU_INFO.open() as lines:  # reading all cores of a server is slow
        return list(takewhile(str.strip, lines))


def read_memory_field(file: Path, field: str) -> int | None:
    """Bytes in a field of /proc/meminfo or of /proc/self/status; None if the system does not report them."""
    lines = file.read_text().splitlines() if file.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), None)


def fsync_path(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write where `path` is or will be."""
    return shutil.disk_usage(existing_parent(path)).free


def file_system(path: Path) -> int:
    """Number of the file system where `path` is or will be."""
    return existing_parent(path).stat().st_dev


def existing_parent(path: Path) -> Path:
    """A path, or its closest parent that exists."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def format_binary_bytes(size: float) -> str:
    """Size with a binary unit, as `df -h` shows it."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}" if unit != "bytes" else f"{size:.0f} bytes"
        size /= 1024
    return f"{size:,.1f} GiB"


def format_bytes(size: float) -> str:
    """Size with a unit."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}" if unit != "bytes" else f"{size:.0f} bytes"
        size /= 1000
    return f"{size:.3g} TB"
