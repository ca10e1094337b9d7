"""The torch compiler is imported only if it is used."""

import subprocess
import sys

import torch

from tunekit.kernels.torch_compile import assume_constant_result, disable_compile

IMPORT_SCRIPT = (
    "import sys, tunekit.recipes.sft, tunekit.recipes.generate, tunekit.recipes.evaluate; "
    "print(*(name for name in sys.modules if name.startswith('torch._dynamo')))"
)


def test_recipes_do_not_import_the_compiler() -> None:
    result = subprocess.run([sys.executable, "-c", IMPORT_SCRIPT], capture_output=True, text=True, check=True)
    assert not result.stdout.split()


def test_decorated_functions_are_not_traced() -> None:
    calls = []

    @disable_compile
    def untraced(x: torch.Tensor) -> torch.Tensor:
        calls.append(torch.compiler.is_compiling())
        return x + len(calls)

    @assume_constant_result
    def constant() -> int:
        return len(calls)  # tracing cannot follow a list that changes outside

    def run(x: torch.Tensor) -> torch.Tensor:
        return untraced(x * (2 + constant())).sin()

    x, compiled = torch.ones(3), torch.compile(run, backend="eager")
    assert torch.equal(compiled(x), (x * 2 + 1).sin())
    assert torch.equal(compiled(x), (x * 2 + 2).sin()), "the constant is of the first call, and the function runs again"
    assert calls == [False, False]
