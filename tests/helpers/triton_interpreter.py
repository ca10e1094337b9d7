"""Triton's interpreter and its limits."""

import importlib
import sys
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

import numpy as np
import pytest


def version_of(package: str) -> tuple[int, int]:
    """Major and minor version; (0, 0) if the package is not installed."""
    try:
        major, minor, *_ = version(package).split(".")
    except PackageNotFoundError:
        return 0, 0
    return int(major), int(minor)


# Loop bounds of the interpreter are arrays of one element, which NumPy 2.4 and newer do not convert to int. Triton 3.7
# fixes it.
requires_interpreter_loops = pytest.mark.skipif(
    version_of("triton") < (3, 7) and version_of("numpy") >= (2, 4),
    reason="the interpreter of Triton 3.6 cannot run loops with NumPy 2.4 or newer",
)


def reduce_in_pairs(self: Any, tensors: tuple[Any, ...]) -> list[Any]:
    """Replacement of `ReduceOps.generic_reduce`: calls the function for all pairs, not for each element."""
    dtypes = [tensor.dtype for tensor in tensors]
    is_scalar, num_dims = self.axis is None, tensors[0].handle.data.ndim
    tensors, axis = self.unravel(tensors, self.axis)
    arrays = [np.moveaxis(tensor.handle.data, axis, 0) for tensor in tensors]
    while len(arrays[0]) > 1:  # a power of 2
        left, right = (
            [self.to_tensor(array[start::2], dtype) for array, dtype in zip(arrays, dtypes, strict=True)]
            for start in (0, 1)
        )
        results = self.combine_fn.fn(*left, *right)
        arrays = [result.handle.data for result in (results if isinstance(results, tuple) else (results,))]
    if is_scalar:
        arrays = [array.reshape((1,) * num_dims) if self.keep_dims else array.item() for array in arrays]
    else:
        arrays = [np.moveaxis(array, 0, axis) if self.keep_dims else array[0] for array in arrays]
    return [self.to_tensor(array, dtype) for array, dtype in zip(arrays, dtypes, strict=True)]


def interpret(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A Triton module of kernels, run by Triton's interpreter."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    interpreter = importlib.import_module("triton.runtime.interpreter")
    monkeypatch.setattr(interpreter.ReduceOps, "generic_reduce", reduce_in_pairs)
    package, _, leaf = name.rpartition(".")
    # Set through monkeypatch first, so that both references are restored: other tests compile these kernels.
    monkeypatch.setattr(sys.modules[package], leaf, None, raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    del sys.modules[name]
    return importlib.import_module(name)
