"""Where is kept what can be made again, and among it compiled code: a folder for each kind of processor."""

import atexit
import hashlib
import os
import platform
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

from tunekit import system

CACHE_VARIABLE = "TUNEKIT_CACHE"
# Lines that tell what a processor is and what instructions it has, on x86 and on Arm; others change by the minute.
CPU_FIELDS = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU ")


def compile_cache_dir() -> Path:
    """A home may be shared by machines of which one cannot run what is made for the other."""
    machine = platform.machine()
    told = hashlib.sha256(f"{machine}\n{describe_cpu()}".encode()).hexdigest()
    return cache_root() / f"{machine}-{told[:8]}"


def cache_root() -> Path:
    """The folder that TUNEKIT_CACHE names, else one among the user's caches. `off` there is for prepared rows only."""
    told = os.environ.get(CACHE_VARIABLE, "off")
    if told not in ("", "off"):
        return Path(told).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or user_home() / ".cache") / "tunekit"


def user_home() -> Path:
    """The home directory. Without one, as in containers with `--user 1234`, a path that cannot be written."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(os.devnull)


def is_writable(folder: Path) -> bool:
    """Whether it can be made: a home may be for reading only, as on nodes of some clusters.

    Some file systems, such as /proc, say that root may write and then make nothing, so it is tried.
    """
    there = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with TemporaryDirectory(dir=there, prefix=".tunekit-"):
            return True
    except OSError:
        return False


def describe_cpu() -> str:
    """Model and instructions of the first core. The model counts because an old kernel lists no new instructions."""
    return "".join(line for line in system.read_cpu_info() if line.startswith(CPU_FIELDS))


def set_compiler_cache_directories() -> None:
    """Give Triton and Inductor a cache directory if they have none and the home directory is not writable.

    Triton would write below `~/.triton`, and fails where it cannot. What users have set stays.
    """
    if "TRITON_CACHE_DIR" in os.environ or can_write_triton_home():
        return
    directory = get_compiler_cache_directory()
    os.environ["TRITON_CACHE_DIR"] = str(directory / "triton")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(directory / "inductor"))


def can_write_triton_home() -> bool:
    return is_writable(Path(os.environ.get("TRITON_HOME") or user_home()) / ".triton" / "cache")


@cache
def get_compiler_cache_directory() -> Path:
    """The cache directory of tunekit, or a temporary one: a fixed name in `/tmp` could be another user's."""
    if is_writable(directory := compile_cache_dir()):
        return directory
    temporary = Path(mkdtemp(prefix="tunekit-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return temporary
