"""Asynchronous copies between the host and devices, and constants that are copied once per device."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from tunekit.devices import is_pinned_on
from tunekit.kernels import fake_mode


def copy_to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor. Uses pinned memory for a GPU: copies of pageable memory wait for all queued work."""
    if device.type == "cuda" and not fake_mode.is_fake():
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


class DeviceConstants:
    """Decorator: creates a small tensor from hashable values once per device, which is an additional last argument."""

    def __init__(self, build: Callable[..., Tensor]) -> None:
        self.build = build
        self.tensors: dict[Hashable, Tensor] = {}

    def __call__(self, *key: Any) -> Tensor:
        if fake_mode.is_fake():  # fake tensors must not outlive the plan that created them
            return self.build_on(*key)
        if key not in self.tensors:
            self.tensors[key] = self.build_on(*key)
        return self.tensors[key]

    def build_on(self, *key: Any) -> Tensor:
        *args, device = key
        with torch.inference_mode(False), torch.device("cpu"):
            return copy_to_device(self.build(*args), device)


class HostCopy:
    """Copy of a tensor that is queued on the device and read later.

    Uses pinned memory on a GPU: reading waits for the work up to the copy, not for work queued afterwards. The tensor
    may be modified once this object exists.
    """

    def __init__(self, numbers: Tensor) -> None:
        self.done: torch.Event | None = None
        if is_pinned_on(numbers.device):
            self.numbers = torch.empty_like(numbers, device="cpu", pin_memory=True)
            self.numbers.copy_(numbers.detach(), non_blocking=True)
            self.done = torch.Event(numbers.device)
            self.done.record(torch.accelerator.current_stream(numbers.device))
        else:
            self.numbers = numbers.detach().clone()

    def read(self) -> list[Any]:
        """Return the numbers, as Tensor.tolist does. Waits for the copy."""
        if self.done is not None:
            self.done.synchronize()
        return self.numbers.tolist()


def read_lag(device: torch.device) -> int:
    """Number of steps after which numbers are read: one on devices that work while the host continues."""
    return 0 if device.type == "cpu" else 1
