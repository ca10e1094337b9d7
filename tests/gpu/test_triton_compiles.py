"""Every Triton kernel through the whole compiler, to machine code, on a machine without a GPU.

The interpreter, with which tests/kernels run kernels, is plain Python: it accepts what the compiler rejects. Compiling
needs processes in which TRITON_INTERPRET was never set, so that all of it happens in subprocesses.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
# The oldest release that pyproject.toml allows; `make test` puts it there, for `import triton` only
OLDEST = ROOT / ".venv" / "triton-3.6"
SHARED_LIMITS = {  # bytes of a block: CUDA C++ Programming Guide, instruction sets of CDNA 3 and RDNA 3
    "sm_75": 64 * 1024,
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
    "gfx942": 64 * 1024,
    "gfx1100": 64 * 1024,
}
# Bytes of a thread: rows of 16384 fill the registers of the backward pass of the norm
SPILL_LIMITS = {"norm_triton.backward_kernel": 256}


def run_script(name: str, *args: str, python_path: Path | None = None) -> Any:
    """The JSON that a script of benchmarks/ prints."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": "" if python_path is None else str(python_path)}
    words = [sys.executable, str(BENCHMARKS / name), *args]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def compile_quick(version: str) -> list[dict[str, Any]]:
    """Each variant of each kernel, once; with the newest version, the largest of each kernel for every target."""
    if version == "newest":
        return run_script("triton_compile.py", "--quick", "--json", "-")
    if not OLDEST.is_dir() and os.environ.get("CI") != "true":
        pytest.skip(f"{OLDEST.relative_to(ROOT)} is not there: `make test` installs it")
    targets = "sm_90"
    return run_script("triton_compile.py", "--quick", "--targets", targets, "--json", "-", python_path=OLDEST)


@cache
def check_launches() -> dict[str, Any]:
    return run_script("triton_checks.py")


def test_every_kernel_has_launches() -> None:
    assert check_launches()["uncovered"] == {"variants": [], "large": []}


# One test: with pytest-xdist, others would compile everything again in another process
@pytest.mark.parametrize("version", ["newest", "3.6.0"])
def test_kernels_compile_to_machine_code_that_fits_every_gpu(version: str) -> None:
    results = compile_quick(version)
    assert len(results) > 100
    assert {result["triton"] == "3.6.0" for result in results} == {version == "3.6.0"}
    assert {result["target"] for result in results} == (set(SHARED_LIMITS) if version == "newest" else {"sm_90"})
    assert not [result for result in results if result["error"]]
    assert not [result for result in results if result["spills"] > SPILL_LIMITS.get(result["kernel"], 0)]
    assert not [result for result in results if result["shared"] > SHARED_LIMITS[result["target"]]]
    # Products and sums that are fused round once in place of twice. Which are fused depends on the code around them:
    # without fusion, losses have the same bits with and without the gradient.
    losses = [r for r in results if r["kernel"].endswith(".losses_kernel") and r["target"].startswith("sm")]
    assert {"GRADIENT=True" in result["variant"] for result in losses} == {True, False}
    assert len({result["multiply_adds"] for result in losses}) == 1


def test_addresses_of_large_tensors_do_not_overflow() -> None:
    """Of launches with more than 2^31 numbers, by bounds of every integer in the IR of Triton."""
    assert check_launches()["overflows"] == []


def test_overflow_check_finds_known_overflows() -> None:
    """One in a mask and one in an address, in kernels that are wrong on purpose; and none in their repaired copies."""
    found = check_launches()["control"]
    assert ["muli" in line for line in found["wrong_mask"]] == [True]
    assert ["muli" in line for line in found["wrong_address"]] == [True]
    assert found["right"] == []


def test_steps_of_other_lengths_compile_nothing() -> None:
    """Thirty training steps with thirty token counts need no kernels but those of the first two."""
    for module, (first_two, all_steps) in check_launches()["compiles"].items():
        assert all_steps == first_two, module
