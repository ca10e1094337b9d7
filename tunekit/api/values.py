"""Values of config keys from Python as plain data, as a YAML file has them."""

import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from tunekit.config import session_code
from tunekit.errors import UserError
from tunekit.models.precision import DTYPES

DTYPE_NAMES = {dtype: name for name, dtype in reversed(DTYPES.items())}  # fp32, not tf32


@runtime_checkable
class NamedCode(Protocol):
    """A function or a class."""

    __name__: str
    __module__: str


class PlainValues:
    """Converts the values of one call. Functions and classes become names, under which this process finds them."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.code: dict[str, Callable[..., Any]] = {}  # by name

    def __call__(self, value: Any, key: str = "") -> Any:
        """A value as plain data. Others, such as objects, are reported by the config loader."""
        if isinstance(value, Mapping):
            return {name: self(item, f"{key}.{name}" if key else str(name)) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self(item, f"{key}.{index}") for index, item in enumerate(value)]
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if isinstance(value, torch.dtype):
            return DTYPE_NAMES.get(value, str(value))
        if isinstance(value, np.generic | np.ndarray):
            return value.tolist()
        return self.register(value, key) if callable(value) else value

    def register(self, value: Callable[..., Any], key: str) -> str:
        """Name of a function or class in the config. Raises UserError if it has none."""
        if not isinstance(value, NamedCode) or not value.__name__.isidentifier():
            raise UserError(f"{self.where}: {key}: {value!r} has no name. Define a function with `def`.")
        names = (value.__name__, *(f"{value.__name__}_{i}" for i in range(2, 100)))
        name = next(name for name in names if self.code.setdefault(name, value) is value)
        return session_code.register_object(value, name)
