"""Functions and classes of a Python session that a config refers to, such as a reward function of a notebook.

A config has their names, `module:name`. Only the process that has registered them can use them.
"""

import re
from collections.abc import Callable
from types import FunctionType
from typing import Any

from tunekit.errors import SESSION_FILES

REFERENCE = re.compile(r"[\w.]+:\w+")
REGISTERED: dict[str, Callable[..., Any]] = {}  # by name


def register_object(value: Callable[..., Any], name: str) -> str:
    """The reference to a function or class. It replaces an earlier one of the same name."""
    reference = f"{value.__module__}:{name}"
    REGISTERED[reference] = value
    functions = [item for item in (value, *vars(value).values()) if isinstance(item, FunctionType)]
    SESSION_FILES.update(function.__code__.co_filename for function in functions)
    return reference


def find_object(reference: str) -> Callable[..., Any] | None:
    """The registered function or class; None if there is none of this name."""
    return REGISTERED.get(reference)
