"""Services of the operating system, without torch: processor, disk."""

import os
import shutil
from itertools import takewhile
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")


def read_cpu_info() -> list[str]:
    """Lines of Linux on the first core, with their ends; empty on other systems."""
    if not CPU_INFO.is_file():
        return []
    with CPU_INFO.open() as lines:  # reading all cores of a server is slow
        return list(takewhile(str.strip, lines))


def fsync_path(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write where `path` is or will be."""
    return shutil.disk_usage(next(place for place in (path, *path.absolute().parents) if place.exists())).free


def format_bytes(size: float) -> str:
    """Size with a unit."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}" if unit != "bytes" else f"{size:.0f} bytes"
        size /= 1000
    return f"{size:.3g} TB"
