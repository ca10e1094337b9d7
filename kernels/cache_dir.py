"""Cache directories, with one directory of compiled code per processor type."""

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
# Lines of /proc/cpuinfo with the model and instruction sets, on x86 and Arm. Other lines change over time.
CPU_FIELDS = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU ")


def compile_cache_dir() -> Path:
    """Directory of compiled code for this processor. Home directories may be shared by different machines."""
    machine = platform.machine()
    digest = hashlib.sha256(f"{machine}\n{describe_cpu()}".encode()).hexdigest()
    return cache_root() / f"{machine}-{digest[:8]}"


def cache_root() -> Path:
    """Directory in TUNEKIT_CACHE, else ~/.cache/tunekit. The value `off` only disables the cache of tokenized rows."""
    value = os.environ.get(CACHE_VARIABLE, "off")
    if value not in ("", "off"):
        return Path(value).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or user_home() / ".cache") / "tunekit"


def user_home() -> Path:
    """Home directory, or a path that is not writable if there is none, as in containers with `--user 1234`."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(os.devnull)


def is_writable(directory: Path) -> bool:
    """Whether a directory can be created. Home directories are read-only on the nodes of some clusters.

    Tries to write, because some file systems, such as /proc, report write permission but reject new files.
    """
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    try:
        with TemporaryDirectory(dir=existing, prefix=".tunekit-"):
            return True
    except OSError:
        return False


def describe_cpu() -> str:
    """Model and instruction sets of the CPU. The model matters because old kernels do not list new instructions."""
    return "".join(line for line in system.read_cpu_info() if line.startswith(CPU_FIELDS))


def set_compiler_cache_directories() -> None:
    """Give Triton and Inductor a cache directory if they have none and the home directory is not writable.

    Triton writes to `~/.triton` by default and fails if it cannot. Variables that users have set are not changed.
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
    """Cache directory of tunekit, or a temporary one. A fixed name in `/tmp` could belong to another user."""
    if is_writable(directory := compile_cache_dir()):
        return directory
    temporary = Path(mkdtemp(prefix="tunekit-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return temporary
