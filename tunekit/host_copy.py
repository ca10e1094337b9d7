"""Numbers of the device for the host, without a wait in the step that made them."""

from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """A copy that is queued after the work that computes the numbers, and read later.

    On a GPU it goes to pinned memory: reading it waits for the work queued so far, not for work queued later. On the
    CPU nothing is copied.
    """

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers.detach()
        self.done: Any = None
        if numbers.device.type == "cuda":
            self.numbers = torch.empty_like(self.numbers, device="cpu", pin_memory=True)
            self.numbers.copy_(numbers.detach(), non_blocking=True)
            self.done = torch.cuda.current_stream(numbers.device).record_event()

    def read(self) -> list[float]:
        if self.done is not None:
            self.done.synchronize()
        return self.numbers.tolist()


def read_lag(device: torch.device) -> int:
    """Steps between computing a number and reading it: one on a device that works asynchronously."""
    return 0 if device.type == "cpu" else 1
