"""Checks of the Triton kernels that need only the frontend of the compiler, as JSON: coverage, recompiles, overflows.

python benchmarks/triton_checks.py
"""

import argparse
import json

import torch
from triton.backends.compiler import GPUTarget
from triton_coverage import find_uncovered
from triton_launch_recorder import describe_versions, empty_meta, record_launches
from triton_launches import LAUNCHES, count_compiles, unique_launches
from triton_overflow_examples import no_overflow, overflow_address, overflow_mask, overflow_row
from triton_ranges import find_overflows

TARGET = GPUTarget("cuda", 80, 32)
# Of thirty steps: odd and even, multiples of 16, 1, below and above the size of a grid
TOKEN_COUNTS = (
    4096,
    4095,
    1,
    16,
    17,
    64,
    100,
    127,
    128,
    1000,
    *(257 * n for n in range(1, 17)),
    8192,
    12345,
    32768,
    65536,
)


def list_uncovered(kind: str) -> list[str]:
    """Kernels without launches of one kind: "variants", "large", or "step"."""
    return find_uncovered(launch.name for launch in unique_launches("cuda", kind))


def list_overflows() -> list[str]:
    """Overflows of the launches with the largest tensors."""
    lines = []
    for kernels in LAUNCHES.values():
        with record_launches(TARGET) as launches:
            kernels.large()
        lines += [line for launch in launches for line in find_overflows(launch)]
    return sorted(set(lines))


def list_control_overflows() -> dict[str, list[str]]:
    """Overflows of kernels with known overflows, which test the check."""
    x = empty_meta(1, dtype=torch.float32)
    with record_launches(TARGET) as launches:
        overflow_mask[(2**20,)](x, 2**30 + 1, BLOCK_SIZE=1024)
        overflow_address[(2**20,)](x, 4096, BLOCK_SIZE=1024)
        overflow_row[(1,)](x, empty_meta(1024, dtype=torch.int32), 4096, BLOCK_SIZE=1024)
        no_overflow[(2**20,)](x, 2**30 + 1, 4096, BLOCK_SIZE=1024)
    return {launch.kernel.__name__: find_overflows(launch) for launch in launches}


def count_all_compiles() -> dict[str, tuple[int, int]]:
    """Number of compiled kernels of each module after two training steps, and after all."""
    steps = [(num_tokens, step) for step, num_tokens in enumerate(TOKEN_COUNTS, start=1)]
    return {name: (count_compiles(steps[:2], name), count_compiles(steps, name)) for name in LAUNCHES}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    checks = {
        "versions": describe_versions(),
        "uncovered": {kind: list_uncovered(kind) for kind in ("variants", "large", "step")},
        "overflows": list_overflows(),
        "control": list_control_overflows(),
        "compiles": count_all_compiles(),
    }
    print(json.dumps(checks, indent=1))


if __name__ == "__main__":
    main()
