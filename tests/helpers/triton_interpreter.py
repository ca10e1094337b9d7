"""Triton's interpreter and its limits."""

import importlib
import sys
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

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


def interpret(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A Triton module of kernels, run by Triton's interpreter."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    package, _, leaf = name.rpartition(".")
    # Set through monkeypatch first, so that both references are restored: other tests compile these kernels.
    monkeypatch.setattr(sys.modules[package], leaf, None, raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    del sys.modules[name]
    return importlib.import_module(name)
