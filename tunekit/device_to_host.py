"""Numbers of the device for the host, without a wait in the step that made them."""

import torch
from torch import Tensor

from tunekit.devices import is_pinned_on


class HostCopy:
    """A copy that is queued behind the work that makes the numbers, and read later.

    On a GPU it goes to pinned memory: reading it waits for the work up to here, and not for what was queued since. On
    the CPU the numbers are there already.
    """

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers.detach()
        self.done: torch.Event | None = None
        if is_pinned_on(numbers.device):
            self.numbers = torch.empty_like(self.numbers, device="cpu", pin_memory=True)
            self.numbers.copy_(numbers.detach(), non_blocking=True)
            self.done = torch.Event(numbers.device)
            self.done.record(torch.accelerator.current_stream(numbers.device))

    def read(self) -> list[float]:
        if self.done is not None:
            self.done.synchronize()
        return self.numbers.tolist()


def steps_behind(device: torch.device) -> int:
    """How many steps later numbers are read: one on a device that works on while the host goes ahead."""
    return 0 if device.type == "cpu" else 1
