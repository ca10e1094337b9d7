"""Run tests of the C++ kernels, compiled with AddressSanitizer and UndefinedBehaviorSanitizer.

python scripts/sanitize_kernels.py [--kernels rope,nf4] [--examples 200] [PYTEST_ARGUMENT ...]

Default: all tests of kernels, and the property tests of hostile arguments with 200 examples each. The first error that
a sanitizer finds ends the run with its report, and exit code 1. Linux with GCC only: other compilers link their
sanitizers in another way.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tunekit.kernels import cpp_extension

ROOT = Path(__file__).parent.parent
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1"
# Rotates more channels than a head has. If the sanitizers report nothing, they are not active.
OVERFLOW = """
import torch
from tunekit.kernels import rope
x, table = torch.zeros(1, 1, 1, 8), torch.zeros(1, 64)
sizes = rope.RopeSizes(1, 1, 8, 64, 0, 8, 8, 1.0, False, False, 1)
rope.compiled().rotate_fp32(x.data_ptr(), x.clone().data_ptr(), table.data_ptr(), table.data_ptr(), sizes)
"""


def find_runtimes(compiler: str) -> list[str]:
    """Paths of the sanitizer libraries of the compiler, to be loaded before all others; empty if it has none."""
    if sys.platform != "linux" or shutil.which(compiler) is None:
        return []
    commands = ([compiler, f"-print-file-name={name}"] for name in ("libasan.so", "libubsan.so"))
    paths = [subprocess.check_output(command, text=True).strip() for command in commands]
    return paths if all(Path(path).is_absolute() for path in paths) else []  # the bare name: not installed


def sanitizer_env(compiler: str, runtimes: list[str], num_examples: int) -> dict[str, str]:
    """Environment in which kernels are built and loaded with sanitizers."""
    return {
        **os.environ,
        "CXX": f"{compiler} {FLAGS}",
        "LD_PRELOAD": ":".join(runtimes),
        # Python and torch never free some of their memory.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TUNEKIT_FUZZ_EXAMPLES": str(num_examples),
        "OMP_NUM_THREADS": "2",
    }


def build(compiler: str, names: list[str]) -> None:
    """Build the kernels here: tests would use torch operations if the compiler failed."""
    os.environ["CXX"] = f"{compiler} {FLAGS}"
    cpp_extension.BUILD_TIMEOUT = 600
    for name in names:
        print(f"building {name}", file=sys.stderr)
        cpp_extension.build_library(Path(cpp_extension.__file__).with_name(f"{name}.cpp"))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sources = sorted(path.stem for path in Path(cpp_extension.__file__).parent.glob("*.cpp"))
    parser.add_argument("--kernels", default=",".join(sources), help="C++ files to build first (default: all)")
    parser.add_argument("--examples", type=int, default=200, help="examples of each property test")
    options, pytest_arguments = parser.parse_known_args(arguments)
    compiler = os.environ.get("CXX", "c++")
    runtimes = find_runtimes(compiler)
    if not runtimes:
        sys.exit(f"error: {compiler} has no sanitizer libraries. Install GCC with libasan and libubsan.")
    build(compiler, options.kernels.split(","))
    env = sanitizer_env(compiler, runtimes, options.examples)
    probe = subprocess.run([sys.executable, "-c", OVERFLOW], env=env, capture_output=True, text=True)
    if "heap-buffer-overflow" not in probe.stderr:
        sys.exit(f"error: the sanitizers do not report an overflow\n{probe.stderr[-2000:]}")
    if not pytest_arguments:
        pytest_arguments = [str(ROOT / "tests/unit/kernels")]
    # Without capturing, because a sanitizer ends the process.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-s", *pytest_arguments]
    return subprocess.run(command, env=env, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
