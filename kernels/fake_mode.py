"""Whether only shapes are asked for, as a plan does: tensors hold no numbers, and no compiled function may be called.

What is made of them is what the fast versions make, whether they can be had on this machine or not.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from tunekit.kernels.torch_compile import assume_constant_result

FAKE_DEVICE: ContextVar[str] = ContextVar("kind of device that only shapes are asked for", default="")


@assume_constant_result  # Dynamo cannot trace a ContextVar: graphs would end here. Fake models are never compiled.
def fake_device() -> str:
    """Device type of the fake tensors, empty outside fake mode."""
    return FAKE_DEVICE.get()


def is_fake() -> bool:
    """Whether there is nothing but shapes."""
    return bool(fake_device())


def device_type(x: Tensor) -> str:
    """The kind of device on which a tensor is, or is thought to be."""
    return fake_device() or x.device.type


def count_true(mask: Tensor) -> int:
    """How many are true; all of them, where nobody can tell."""
    return mask.numel() if is_fake() else int(mask.sum())


@contextmanager
def fake_mode(device: str = "cpu") -> Iterator[None]:
    """Until the end there is nothing but shapes, as they would be on this kind of device."""
    token = FAKE_DEVICE.set(device)
    try:
        yield
    finally:
        FAKE_DEVICE.reset(token)
