"""The grouped products compile to machine code for each GPU that takes them, without a GPU."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
B, I = "*bf16", "i32"  # noqa: E741
PRODUCT = {"x": B, "weight": B, "y": B, "ends": "*i32"}
PRODUCT |= dict.fromkeys(("experts", "columns", "inner", "expert_stride", "column_stride", "inner_stride"), I)
OUTER = {"left": B, "right": B, "y": B, "ends": "*i32", "width": I, "columns": I}
TILES = {"ROWS": 64, "COLUMNS": 128, "INNER": 64}
CASES = [
    ("experts", "product_kernel", PRODUCT | {"expert_stride": "i64"}, TILES | {"EXPERTS": 256}),
    ("experts", "outer_kernel", OUTER, TILES),
]
SHARED = {80: 163, 89: 99, 120: 99}  # KB of shared memory that a program may have
PROGRAM = """
import sys, triton
from importlib import import_module
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
sys.path.insert(0, "tests/gpu")
from test_experts_triton_compiles import CASES, SHARED
for file, name, types, constants in CASES:
    kernel = getattr(import_module(f"tunekit.kernels.{file}_triton"), name)
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types[n] for n in names}
    values = {(names.index(n),): value for n, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n] in ("*bf16", "i32", "i64")}
    for capability, limit in SHARED.items():
        source = ASTSource(kernel, signature, values, aligned)
        options = {"num_stages": 3, "num_warps": 4}
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert made.metadata.shared <= limit * 1024, (name, capability, made.metadata.shared)
        assert "mma" in made.asm["ptx"], (name, capability)
        print(name, capability, made.metadata.shared)
"""


def test_grouped_products_compile_and_fit_shared_memory() -> None:
    """In a process of its own: Triton must not have been loaded as its interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("\n") == len(CASES) * len(SHARED)
