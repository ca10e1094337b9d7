"""What torch.compile is told of functions, without loading it.

The decorators of `torch.compiler` load the compiler at once, which takes longer than all else that a recipe imports.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch._compile import _disable_dynamo

F = TypeVar("F", bound=Callable[..., Any])


def disable_compile(function: F) -> F:
    """Run as it is under a compiler, as torch.compiler.disable says. torch's own functions are marked so too."""
    return cast(F, _disable_dynamo(function))


def assume_constant_result(function: F) -> F:
    """Asked once, when a graph is made, as torch.compiler.assume_constant_result says: it sets the same mark."""
    vars(function)["_dynamo_marked_constant"] = True
    return function
