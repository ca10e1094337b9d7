"""Fake mode, used by `tune plan`: tensors have shapes but no data, and kernels only return outputs of the right shape.

The fast versions are simulated, whether this machine supports them or not.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from tunekit.kernels.torch_compile import assume_constant_result

FAKE_DEVICE: ContextVar[str] = ContextVar("simulated device type", default="")


@assume_constant_result  # Dynamo cannot trace a ContextVar, which would break graphs. Fake models are never compiled.
def fake_device() -> str:
    """Device type of the fake tensors, empty outside fake mode."""
    return FAKE_DEVICE.get()


def is_fake() -> bool:
    """Whether fake mode is active."""
    return bool(fake_device())


def device_type(x: Tensor) -> str:
    """Device type of a tensor; the simulated one in fake mode."""
    return fake_device() or x.device.type


def count_true(mask: Tensor) -> int:
    """Number of true elements; all of them in fake mode."""
    return mask.numel() if is_fake() else int(mask.sum())


@contextmanager
def fake_mode(device: str = "cpu") -> Iterator[None]:
    """Context in which tensors are fake and simulate this device type."""
    token = FAKE_DEVICE.set(device)
    try:
        yield
    finally:
        FAKE_DEVICE.reset(token)
