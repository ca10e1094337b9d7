"""Asynchronous copies from the host, and constants that are copied once per device."""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from tunekit.kernels import fake_mode


def copy_to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor. Uses pinned memory for a GPU: copies of pageable memory wait for all queued work."""
    if device.type == "cuda" and not fake_mode.is_fake():
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


class DeviceConstants:
    """Small tensors that are functions of hashable values, created once per device when first requested."""

    def __init__(self, build: Callable[..., Tensor]) -> None:
        self.build = build
        self.tensors: dict[Hashable, Tensor] = {}

    def __call__(self, *key: Hashable, device: torch.device) -> Tensor:
        if fake_mode.is_fake():  # fake tensors must not outlive the plan that created them
            return self.build_on(key, device)
        if (key, device) not in self.tensors:
            self.tensors[key, device] = self.build_on(key, device)
        return self.tensors[key, device]

    def build_on(self, key: tuple[Hashable, ...], device: torch.device) -> Tensor:
        with torch.inference_mode(False), torch.device("cpu"):
            return copy_to_device(self.build(*key), device)
