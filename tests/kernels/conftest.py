"""Ways of a kernel, whose module a test file names as KERNEL."""

import importlib
import sys
from types import ModuleType

import pytest


@pytest.fixture(params=["fast", "reference"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is compiled, and plain torch as on machines without a compiler."""
    kernel = request.module.KERNEL
    if request.param == "reference":
        monkeypatch.setattr(kernel, "compiled", lambda: None)
    elif kernel.compiled() is None:
        pytest.skip("no compiler")
    return request.param


@pytest.fixture
def interpreted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The kernels for a GPU, as Triton's interpreter runs them."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    name = f"{request.module.KERNEL.__name__}_triton"
    package, _, leaf = name.rpartition(".")
    # Recorded first, so that neither of the two references outlives the test: others compile these kernels.
    monkeypatch.setattr(sys.modules[package], leaf, None, raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    del sys.modules[name]
    return importlib.import_module(name)
