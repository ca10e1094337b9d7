"""Every Triton kernel through the whole compiler, to machine code, on a machine without a GPU.

The interpreter, with which tests/unit/kernels run kernels, is plain Python: it accepts what the compiler rejects.
Compiling needs processes in which TRITON_INTERPRET was never set, so that all of it happens in subprocesses.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tunekit.kernels import grouped_mm

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
# Bytes of a thread: rows of 16384 fill the registers of the backward pass of the norm, and skewed divergences of capped
# logits take all of 128 registers
SPILL_LIMITS = {"rms_norm_triton.backward_kernel": 256, "kl_divergence_triton.divergence_kernel": 32}
SPILL_LIMITS_OF_TARGETS = {
    ("nf4_matmul_triton.matmul_kernel", "gfx1100"): 512,
    ("grouped_mm_triton.product_kernel", "gfx1100"): 256,
    ("cross_entropy_triton.losses_kernel", "sm_89"): 4,  # with Triton 3.6: one number of capped logits in 8192 columns
}


@pytest.fixture
def triton_coverage(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return import_module("triton_coverage")


def run_script(name: str, *args: str, python_path: Path | None = None) -> Any:
    """The JSON that a script of benchmarks/ prints."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": "" if python_path is None else str(python_path)}
    words = [sys.executable, str(BENCHMARKS / name), *args]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def compile_quick(version: str) -> list[dict[str, Any]]:
    """With the newest version, each pair of flags for one target; the oldest compiles the largest only."""
    if version == "newest":
        return run_script("triton_compile.py", "--quick", "--json", "-")
    if not OLDEST.is_dir() and os.environ.get("CI") != "true":
        pytest.skip(f"{OLDEST.relative_to(ROOT)} does not exist: `make test` installs it")
    targets = "sm_90"
    return run_script("triton_compile.py", "--largest", "--targets", targets, "--json", "-", python_path=OLDEST)


def get_spill_limit(result: dict[str, Any]) -> int:
    limit = SPILL_LIMITS.get(result["kernel"], 0)
    return SPILL_LIMITS_OF_TARGETS.get((result["kernel"], result["target"]), limit)


@cache
def check_launches() -> dict[str, Any]:
    return run_script("triton_checks.py")


def test_every_kernel_has_launches() -> None:
    assert check_launches()["uncovered"] == {"variants": [], "large": [], "step": []}


NEW_KERNELS = """
from functools import partial
import triton as t
from triton import jit
from tunekit.kernels import old_triton as old
from tunekit.kernels.old_triton import called_by_name

@t.jit
def compiled(x): called(x), called_by_name(x), old.called_by_module(x), shadowed(x)
@jit
def called(x): pass
@t.jit
def shadowed(x): pass
@t.autotune([], key=[])
@t.jit(do_not_specialize=["x"])
def tuned(x, compiled): compiled(x)
def build():
    @jit
    def nested(x): pass
    return partial(t.jit, repr=build)(nested)
def not_a_kernel(x): pass
"""
OLD_KERNELS = """
import triton
@triton.jit
def called_by_name(x): shadowed = called_by_nothing = x; called_by_nothing(shadowed)
@triton.jit
def called_by_module(x): pass
@triton.jit
def called_by_nothing(x): pass
"""


def test_coverage_check_finds_kernels_that_are_not_compiled(triton_coverage: ModuleType, tmp_path: Path) -> None:
    """However they are decorated and imported. Calls count, and local variables of the same name do not."""
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "new_triton.py").write_text(NEW_KERNELS, "utf-8")
    (tmp_path / "old_triton.py").write_text(OLD_KERNELS, "utf-8")
    uncovered = triton_coverage.find_uncovered(["new_triton.compiled", "renamed"], tmp_path)
    line = 1 + NEW_KERNELS.splitlines().index("    return partial(t.jit, repr=build)(nested)")
    expected = {"old_triton.called_by_nothing", "new_triton.tuned", "new_triton.nested", f"new_triton:{line}"}
    assert set(uncovered) == expected


# One test: with pytest-xdist, others would compile everything again in another process
@pytest.mark.parametrize("version", ["newest", "3.6.0"])
def test_kernels_compile_to_machine_code_that_fits_every_gpu(version: str, triton_coverage: ModuleType) -> None:
    results = compile_quick(version)
    assert triton_coverage.find_uncovered(result["kernel"] for result in results) == []
    assert len(results) > (100 if version == "newest" else 15)
    installed = importlib.metadata.version("triton")  # which may be the oldest
    assert {result["triton"] for result in results} == {installed if version == "newest" else version}
    assert {result["target"] for result in results} == (set(SHARED_LIMITS) if version == "newest" else {"sm_90"})
    assert not [result for result in results if result["error"]]
    assert not [result for result in results if result["spills"] > get_spill_limit(result)]
    assert not [result for result in results if result["shared"] > SHARED_LIMITS[result["target"]]]
    check_instructions(results, {True, False} if version == "newest" else {True})


def check_instructions(results: list[dict[str, Any]], gradients: set[bool]) -> None:
    """Instructions that decide which numbers come out, and how fast."""
    # Products and sums that are fused round once instead of twice. Which are fused depends on the code around them:
    # without fusion, losses have the same bits with and without the gradient.
    losses = [r for r in results if r["kernel"].endswith(".losses_kernel") and r["target"].startswith("sm")]
    assert {"NEEDS_GRADIENT=True" in result["variant"] for result in losses} == gradients
    assert len({result["fma_instructions"] for result in losses}) == 1
    # Inverse scales of large weights, and the divisor of zeros, are subnormal numbers
    assert not [
        result
        for result in results
        if result["kernel"] == "nf4_triton.quantize_kernel" and result["flushes_subnormals"]
    ]
    products = [result for result in results if result["kernel"].startswith("grouped_mm_triton.")]
    assert products and all(result["mma_instructions"] for result in products)


def test_addresses_of_large_tensors_do_not_overflow() -> None:
    """Launches have more than 2^31 numbers; bounds of every integer follow from the IR of Triton."""
    assert check_launches()["overflows"] == []


def test_overflow_check_finds_known_overflows() -> None:
    """One in a mask and two in addresses, in kernels that are wrong on purpose; and none in their repaired copies."""
    overflows = check_launches()["control"]
    assert ["muli" in line for line in overflows["overflow_mask"]] == [True]
    assert ["muli" in line for line in overflows["overflow_address"]] == [True]
    assert ["muli" in line for line in overflows["overflow_row"]] == [True]
    assert overflows["no_overflow"] == []


def test_steps_of_other_lengths_compile_nothing() -> None:
    """Thirty training steps with thirty token counts need no kernels but those of the first two."""
    for module, (first_two, all_steps) in check_launches()["compiles"].items():
        assert all_steps == first_two, module


def test_grouped_products_use_triton_only_where_it_has_tensor_cores_for_bf16() -> None:
    """Elsewhere they are torch's: a kernel on sm_90 and sm_100, a loop on sm_75, for which Triton would multiply."""
    assert [generation for generation in range(7, 13) if grouped_mm.prefers_triton(generation)] == [8, 11, 12]
