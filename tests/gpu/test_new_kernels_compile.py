"""Machine code of the kernels for quantization, float8 weights and divergences, without a GPU.

Run as a script, it prints registers, spills and shared memory of each kernel and target:
    python tests/gpu/test_new_kernels_compile.py [--all]
Tests do so in a process of its own: kernels that were loaded for Triton's interpreter cannot be compiled.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
TARGETS = (75, 80, 86, 89, 90, 100, 120)
SHARED_LIMIT = 48 * 1024  # bytes of a block that every GPU has
B, H, F, U, I, L, N = "*bf16", "*fp16", "*fp32", "*u8", "i32", "i64", "fp32"  # noqa: E741
QUANTIZE = {"bounds": F, "codes": U, "packed": U, "scales": F, "smallest": N}
FLOAT8 = {"codes": U, "scales": F}
DIVERGENCE = {"out": F, **dict.fromkeys(("count", "vocab", "student_stride", "teacher_stride"), I)}
DIVERGENCE |= dict.fromkeys(("student_scale", "student_cap", "teacher_scale", "teacher_cap", "rate", "ratio"), N)
DIVERGENCE |= dict.fromkeys(("slope", "forward", "forward_skew", "reverse", "reverse_skew"), N)


class Case(NamedTuple):
    """A variant that the dispatch can choose."""

    file: str
    kernel: str
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any]
    every_target: bool = False  # in quick runs too; others are compiled for one target


def quantize_case(dtype: str, count: str, tail: bool, every_target: bool = False) -> Case:
    constants = {"BLOCKS": 16, "TAIL": tail}
    types = {**QUANTIZE, "weight": dtype, "count": count}
    return Case("nf4_triton", "quantize_kernel", types, constants, {"enable_fp_fusion": False}, every_target)


def divergence_case(dtypes: tuple[str, str], mixture: tuple[int, int], cap: bool, gradient: bool, size: int) -> Case:
    """`mixture`: 0 without, 1 plain, 2 skewed, of the forward and the reverse KL divergence."""
    types = {**DIVERGENCE, "student": dtypes[0], "teacher": dtypes[1]}
    constants = {"FORWARD": mixture[0], "REVERSE": mixture[1], "STUDENT_CAP": cap, "TEACHER_CAP": cap}
    constants |= {"GRADIENT": gradient, "SIZE": size}
    options = {"num_warps": max(1, size // 256), "enable_fp_fusion": False}
    return Case("divergence_triton", "divergence_kernel", types, constants, options, mixture == (2, 2) and size > 256)


FEW = {"x": B, "packed": U, "scales": F, "outer": F, "table": F, "fine": F, "bias": B, "y": B}
FEW |= dict.fromkeys(("rows", "out", "width", "groups"), I)


def few_case(rows: int, nested: bool, every_target: bool) -> Case:
    """Tiles for one or two rows."""
    types = {**FEW, "scales": U if nested else F}
    constants = {"ROWS": rows, "OUT": 4, "WIDTH": 512, "NEST": nested, "BIAS": True}
    return Case("nf4_triton", "few_kernel", types, constants, {"enable_fp_fusion": False}, every_target)


CASES = [
    few_case(2, True, True),
    few_case(1, False, False),
    quantize_case(B, I, False, True),
    *(quantize_case(dtype, count, tail) for dtype, count, tail in ((F, L, False), (H, I, False), (B, I, True))),
    Case("float8_triton", "dequantize_kernel", {**FLOAT8, "out": B, "count": I}, {"BLOCKS": 32}, {}, True),
    Case("float8_triton", "dequantize_kernel", {**FLOAT8, "out": F, "count": L}, {"BLOCKS": 32}, {}),
    Case("float8_triton", "dequantize_kernel", {**FLOAT8, "out": H, "count": I}, {"BLOCKS": 32}, {}),
    divergence_case((B, B), (2, 2), True, True, 2048),
    divergence_case((B, B), (1, 0), False, True, 2048),
    divergence_case((B, F), (0, 1), True, True, 2048),
    divergence_case((F, B), (1, 1), False, True, 2048),
    divergence_case((H, H), (2, 0), True, False, 2048),
    divergence_case((F, F), (0, 2), False, False, 2048),
    divergence_case((B, B), (1, 2), False, True, 128),
]


def load_kernel(case: Case) -> Any:
    """The kernel of a module that is loaded from its file, without tunekit."""
    spec = importlib.util.spec_from_file_location(case.file, ROOT / "kernels" / f"{case.file}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)[case.kernel]


def compile_case(case: Case, capability: int, cuobjdump: Path) -> dict[str, Any]:
    """Resources of a kernel, as in its machine code, and how its IR computes offsets."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = load_kernel(case)
    names = kernel.arg_names
    signature = {name: "constexpr" if name in case.constants else case.types[name] for name in names}
    values = {(names.index(name),): value for name, value in case.constants.items()}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name] not in (N, "constexpr")
    }
    source = ASTSource(kernel, signature, values, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=case.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    sizes = {name: int(size) for name, size in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    program = re.findall(r"(%\S+) = tt.get_program_id", compiled.asm["ttir"])
    uses = [line for name in program for line in compiled.asm["ttir"].splitlines() if re.search(rf"{name}\b", line)]
    return {
        "kernel": case.kernel,
        "constants": case.constants,
        "types": [kind for kind in case.types.values() if kind.startswith("*")],
        "target": capability,
        "registers": sizes["REG"],
        "spills": sizes["STACK"] + sizes["LOCAL"],
        "shared": compiled.metadata.shared,
        "int64": all("tt.get_program_id" in line or ("extsi" in line and "i64" in line) for line in uses),
        "flushes": "ftz" in compiled.asm["ptx"],
    }


def compile_all(every: bool) -> Iterator[dict[str, Any]]:
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    for case in CASES:
        for capability in TARGETS if every or case.every_target else (90,):
            yield {**compile_case(case, capability, cuobjdump), "triton": triton.__version__}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    run = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_every_case_compiles(results: list[dict[str, Any]]) -> None:
    expected = sum(len(TARGETS) if case.every_target else 1 for case in CASES)
    assert len(results) == expected and {result["target"] for result in results} == set(TARGETS)


def test_register_spills_are_bounded(results: list[dict[str, Any]]) -> None:
    """Skewed divergences of capped logits take all of 128 registers."""
    assert not [result for result in results if result["spills"] > 32 * (result["kernel"] == "divergence_kernel")]


def test_shared_memory_fits_every_gpu(results: list[dict[str, Any]]) -> None:
    assert not [result for result in results if result["shared"] > SHARED_LIMIT]


def test_offsets_are_int64(results: list[dict[str, Any]]) -> None:
    """Products with the number of the program overflow beyond 2^31 numbers; outputs of a matrix are fewer."""
    assert all(result["int64"] for result in results if result["kernel"] != "few_kernel")


def test_quantization_computes_with_subnormal_numbers(results: list[dict[str, Any]]) -> None:
    """Inverse scales of large weights, and the divisor of zeros, would be zero otherwise."""
    assert not [result for result in results if result["kernel"] == "quantize_kernel" and result["flushes"]]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for outcome in compile_all("--all" in sys.argv):
            print(json.dumps(outcome), flush=True)
