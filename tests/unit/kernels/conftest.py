"""Fixtures that select the implementation of the kernel module that a test file assigns to KERNEL."""

from types import ModuleType

import pytest

from tests.helpers.triton_interpreter import interpret


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
    return interpret(f"{request.module.KERNEL.__name__}_triton", monkeypatch)
