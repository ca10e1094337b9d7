"""C++ for the CPU: one file, compiled when it is first needed and kept. No compiler, no harm: torch does the work.

torch's own loader wants ninja, the headers of Python and half a minute. A few loops over pointers want a compiler and
two seconds.
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
# Plain loops are made for the processor at hand: AVX2, AVX-512 or NEON, whatever it has.
NATIVE_FLAGS = {"x86_64": "-march=native", "aarch64": "-mcpu=native", "arm64": "-mcpu=native"}
# The compiler of macOS does without; torch brings the library that elsewhere answers to this.
OPENMP_FLAGS = () if sys.platform == "darwin" else ("-fopenmp",)
INCLUDE_PATTERN = re.compile(r'^#include "(.+)"', re.MULTILINE)
BUILD_TIMEOUT = 120  # a build that takes longer is given up


@cache
def load_library(source: Path) -> ctypes.CDLL | None:
    """The functions of a file; None, and a line that says so, where they cannot be had."""
    try:
        return ctypes.CDLL(str(build_library(source)))
    except (OSError, subprocess.SubprocessError) as error:
        last = str(error).strip().splitlines()[-1]
        warn_unavailable(last)
        return None


@cache
def warn_unavailable(reason: str) -> None:
    """One line for each reason, not for each file: without a compiler none can be built."""
    print(f"warning: C++ cannot be built ({reason}): torch does its work, more slowly", file=sys.stderr)


def build_library(source: Path) -> Path:
    """The compiled file, from an earlier time if there was one. Processes that build at once do not disturb another."""
    native = filter(None, [NATIVE_FLAGS.get(platform.machine())])
    words = [*shlex.split(os.environ.get("CXX", "c++")), *FLAGS, *OPENMP_FLAGS, *native]
    if shutil.which(words[0]) is None:
        raise FileNotFoundError(f"there is no compiler {words[0]!r}")
    told = "\n".join([*words, *platform.libc_ver(), *source_texts(source)])
    home = compile_cache_dir()
    made = home / f"{source.stem}-{hashlib.sha256(told.encode()).hexdigest()[:16]}.so"
    if not made.is_file():
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home) as place:
            part = Path(place) / made.name
            run_compiler([*words, str(source), "-o", str(part)])
            part.replace(made)
    return made


def source_texts(source: Path) -> list[str]:
    """A file and the headers beside it that it includes."""
    text = source.read_text("utf-8")
    return [text, *(source.with_name(name).read_text("utf-8") for name in INCLUDE_PATTERN.findall(text))]


def run_compiler(words: list[str]) -> None:
    """Run the compiler; what it prints goes into the error, not to the screen."""
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=BUILD_TIMEOUT)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or [f"exit code {done.returncode}"]
        raise OSError(errors[0])


def use_torch_fallback(x: Tensor, lib: Callable[[], ctypes.CDLL | None], min_size: int = 0) -> bool:
    """Whether plain torch does the work: what is compiled it fuses itself, and not every CPU has the C++ of `lib`.

    With fewer than `least` numbers torch is done on a CPU before that has begun.
    """
    if torch.compiler.is_compiling():
        return True
    if x.device.type == "cpu" and fake_mode.is_fake():
        return x.numel() < min_size
    if x.device.type == "cuda":
        return not uses_triton(x)
    return x.device.type != "cpu" or x.numel() < min_size or lib() is None


def contiguous_rows(x: Tensor) -> Tensor:
    """Rows (N, dim) whose numbers stand one behind the other: no copy where rows have one distance from each other."""
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
