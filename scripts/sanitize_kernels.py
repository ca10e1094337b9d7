"""Run tests of the C++ kernels, compiled with AddressSanitizer and UndefinedBehaviorSanitizer.

python scripts/sanitize_kernels.py [--kernels rope,nf4] [--examples 200] [PYTEST_ARGUMENT ...]

Default: all kernel tests, with 200 examples for each property test of hostile arguments. The run ends with the report
of the first error that a sanitizer finds, and with exit code 1. Requires Linux and GCC, because other compilers link
their sanitizers differently.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tunekit.kernels import cpp_extension

ROOT = Path(__file__).parent.parent
SANITIZER_FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1"
# Rotates more channels than a head has. If the sanitizers do not report this, they are not active.
OVERFLOW_PROGRAM = """
import torch
from tunekit.kernels import rope
x, table = torch.zeros(1, 1, 1, 8), torch.zeros(1, 64)
sizes = rope.RopeSizes(1, 1, 8, 64, 0, 8, 8, 1.0, False, False, 1)
rope.compiled().rotate_fp32(x.data_ptr(), x.clone().data_ptr(), table.data_ptr(), table.data_ptr(), sizes)
"""


def find_sanitizer_libraries(compiler: str) -> list[str]:
    """Paths of the sanitizer libraries of the compiler, for LD_PRELOAD. Empty if they are not installed."""
    if sys.platform != "linux" or shutil.which(compiler) is None:
        return []
    commands = ([compiler, f"-print-file-name={name}"] for name in ("libasan.so", "libubsan.so"))
    paths = [subprocess.check_output(command, text=True).strip() for command in commands]
    # The compiler prints the file name alone if the library is not installed.
    return paths if all(Path(path).is_absolute() for path in paths) else []


def build_environment(compiler: str, libraries: list[str], num_examples: int) -> dict[str, str]:
    """Environment variables to build and load kernels with sanitizers."""
    return {
        **os.environ,
        "CXX": f"{compiler} {SANITIZER_FLAGS}",
        "LD_PRELOAD": ":".join(libraries),
        # Python and torch do not free all memory.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TUNEKIT_FUZZ_EXAMPLES": str(num_examples),
        "OMP_NUM_THREADS": "2",
    }


def build_kernels(compiler: str, names: list[str]) -> None:
    """Build the kernels, and fail if the compiler does: tests would use torch operations instead."""
    os.environ["CXX"] = f"{compiler} {SANITIZER_FLAGS}"
    cpp_extension.BUILD_TIMEOUT = 600
    for name in names:
        print(f"building {name}", file=sys.stderr)
        cpp_extension.build_library(Path(cpp_extension.__file__).with_name(f"{name}.cpp"))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sources = sorted(path.stem for path in Path(cpp_extension.__file__).parent.glob("*.cpp"))
    parser.add_argument("--kernels", default=",".join(sources), help="C++ files to build first (default: all)")
    parser.add_argument("--examples", type=int, default=200, help="examples of each property test")
    args, pytest_args = parser.parse_known_args(argv)
    compiler = os.environ.get("CXX", "c++")
    libraries = find_sanitizer_libraries(compiler)
    if not libraries:
        sys.exit(f"error: {compiler} has no sanitizer libraries. Install GCC with libasan and libubsan.")
    build_kernels(compiler, args.kernels.split(","))
    env = build_environment(compiler, libraries, args.examples)
    overflow = subprocess.run([sys.executable, "-c", OVERFLOW_PROGRAM], env=env, capture_output=True, text=True)
    if "heap-buffer-overflow" not in overflow.stderr:
        sys.exit(f"error: the sanitizers do not report an overflow\n{overflow.stderr[-2000:]}")
    if not pytest_args:
        pytest_args = [str(ROOT / "tests/unit/kernels")]
    # -s: captured output would be lost when a sanitizer ends the process.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-s", *pytest_args]
    return subprocess.run(command, env=env, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
