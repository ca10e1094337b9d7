"""Decorators of `torch.compiler` that do not import the compiler.

The original ones import it at once, which takes longer than all other imports of a recipe.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch._compile import _disable_dynamo

F = TypeVar("F", bound=Callable[..., Any])


def disable_compile(function: F) -> F:
    """Exclude a function from compilation, like torch.compiler.disable. torch uses this decorator internally."""
    return cast(F, _disable_dynamo(function))


def assume_constant_result(function: F) -> F:
    """Evaluate a function once per graph, like torch.compiler.assume_constant_result, which sets the same attribute."""
    vars(function)["_dynamo_marked_constant"] = True
    return function
