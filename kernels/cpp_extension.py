"""Build and load C++ kernels for the CPU. A file is compiled when it is first needed, and cached.

torch.utils.cpp_extension needs ninja, Python headers and 30 s. These kernels only need a compiler and 2 s. Without a
compiler, torch operations replace them.
"""

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from tunekit.kernels import fake_mode
from tunekit.kernels.cache_dir import compile_cache_dir
from tunekit.kernels.triton_support import uses_triton

FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off")
# Loops are vectorized for the current processor: AVX2, AVX-512 or NEON.
NATIVE_FLAGS = {"x86_64": "-march=native", "aarch64": "-mcpu=native", "arm64": "-mcpu=native"}
# The compiler of macOS does not know this flag; torch ships the OpenMP library.
OPENMP_FLAGS = () if sys.platform == "darwin" else ("-fopenmp",)
INCLUDE_PATTERN = re.compile(r'^#include "(.+)"', re.MULTILINE)
BUILD_TIMEOUT = 120  # seconds
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}  # suffixes of functions that C++ is compiled for


@cache
def load_library(source: Path) -> ctypes.CDLL | None:
    """Load the library of a C++ file; None, with a warning, if it cannot be built."""
    try:
        return ctypes.CDLL(str(build_library(source)))
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(error).strip().splitlines()[-1]
        warn_unavailable(reason)
        return None


@cache
def warn_unavailable(reason: str) -> None:
    """Print a warning once per reason, not per file."""
    print(f"warning: C++ kernels cannot be built ({reason}). Slower torch operations are used.", file=sys.stderr)


def build_library(source: Path) -> Path:
    """Path of the compiled library, built if it is not cached. Safe if several processes build at the same time."""
    native_flags = filter(None, [NATIVE_FLAGS.get(platform.machine())])
    command = [*shlex.split(os.environ.get("CXX", "c++")), *FLAGS, *OPENMP_FLAGS, *native_flags]
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(f"compiler {command[0]!r} not found")
    key = "\n".join([*command, *platform.libc_ver(), *source_texts(source)])
    directory = compile_cache_dir()
    library = directory / f"{source.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if not library.is_file():
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as temporary:
            output = Path(temporary) / library.name
            run_compiler([*command, str(source), "-o", str(output)])
            output.replace(library)
    return library


def source_texts(source: Path) -> list[str]:
    """Text of a file, and of the headers in its directory that it includes."""
    text = source.read_text("utf-8")
    return [text, *(source.with_name(name).read_text("utf-8") for name in INCLUDE_PATTERN.findall(text))]


def run_compiler(command: list[str]) -> None:
    """Run the compiler. Raises OSError with its first error line."""
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=BUILD_TIMEOUT)
    if result.returncode != 0:
        errors = [line for line in result.stderr.splitlines() if "error" in line] or [f"exit code {result.returncode}"]
        raise OSError(errors[0])


def has_kernel(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a dtype has a kernel: on a CPU those that C++ is compiled for, on a GPU also fp16."""
    return dtype in DTYPES or (dtype == torch.float16 and device.type == "cuda")


def use_torch_fallback(x: Tensor, lib: Callable[[], ctypes.CDLL | None], min_size: int = 0) -> bool:
    """Whether to use torch operations: under torch.compile, which fuses them, or if no kernel is available for `x`.

    On a CPU, also for fewer than `min_size` elements, where the call overhead of a kernel is too large.
    """
    if torch.compiler.is_compiling() or not has_kernel(x.dtype, x.device):
        return True
    if x.device.type == "cpu" and fake_mode.is_fake():
        return x.numel() < min_size
    if x.device.type == "cuda":
        return not uses_triton(x)
    return x.device.type != "cpu" or x.numel() < min_size or lib() is None


def contiguous_rows(x: Tensor) -> Tensor:
    """View or copy as rows (N, dim) with contiguous elements. Copies only if the rows have no common stride."""
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
