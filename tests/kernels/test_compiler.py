"""The compiler is loaded by those who want it."""

import subprocess
import sys

import pytest
import torch

from tunekit.kernels.torch_compile import assume_constant_result, disable_compile

ALL = "import sys, tunekit.recipes.{0}; print(*(name for name in sys.modules if name.startswith('torch._dynamo')))"


@pytest.mark.parametrize("recipe", ["sft", "generate", "evaluate"])
def test_a_recipe_does_not_load_the_compiler(recipe: str) -> None:
    done = subprocess.run([sys.executable, "-c", ALL.format(recipe)], capture_output=True, text=True, check=True)
    assert not done.stdout.split()


def test_functions_are_marked_for_the_compiler() -> None:
    calls = []

    @disable_compile
    def seen(x: torch.Tensor) -> torch.Tensor:
        calls.append(torch.compiler.is_compiling())
        return x + len(calls)

    @assume_constant_result
    def fixed() -> int:
        return len(calls)  # a graph could not follow a list that others change

    def run(x: torch.Tensor) -> torch.Tensor:
        return seen(x * (2 + fixed())).sin()

    x, fast = torch.ones(3), torch.compile(run, backend="eager")
    assert torch.equal(fast(x), (x * 2 + 1).sin())
    assert torch.equal(fast(x), (x * 2 + 2).sin()), "the constant is that of the first call, the function ran again"
    assert calls == [False, False]
