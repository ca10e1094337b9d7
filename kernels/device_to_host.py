"""Asynchronous copies of device tensors to the host."""

from typing import Any

import torch
from torch import Tensor

from tunekit.devices import is_pinned_on


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
