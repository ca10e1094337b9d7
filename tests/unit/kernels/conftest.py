"""Fixtures that select the implementation of the kernel module that a test file assigns to KERNEL."""

import importlib
import sys
from types import ModuleType

import pytest


@pytest.fixture(params=["fast", "reference"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with the compiled kernel, and with its torch reference as on machines without a compiler."""
    kernel = request.module.KERNEL
    if request.param == "reference":
        monkeypatch.setattr(kernel, "compiled", lambda: None)
    elif kernel.compiled() is None:
        pytest.skip("no compiler")
    return request.param


@pytest.fixture
def interpreted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The Triton module of the kernel, run by Triton's interpreter."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    name = f"{request.module.KERNEL.__name__}_triton"
    package, _, leaf = name.rpartition(".")
    # Set through monkeypatch first, so that both references are restored: other tests compile these kernels.
    monkeypatch.setattr(sys.modules[package], leaf, None, raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    del sys.modules[name]
    return importlib.import_module(name)
