"""Copies of tensors in host memory, from which a state is written while training continues."""

from collections.abc import Mapping

import torch
from torch import Tensor

from tunekit.devices import is_pinned_on

BLOCK = 64 * 2**20  # bytes of a pinned block


class HostCopies:
    """Copies in pageable host memory that is reused for the next state.

    Pinned copies would be faster, but torch rounds each allocation up to a power of two, and pinning takes 0.3 s/GB at
    the first save. GPU tensors are copied through two pinned blocks of fixed size instead.
    """

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}
        self.staging: Staging | None = None

    def missing_bytes(self, tensors: Mapping[str, Tensor]) -> int:
        """Bytes that must be allocated to copy these tensors."""
        return sum(tensor.nbytes for name, tensor in tensors.items() if name not in self.buffers)

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """Copy a tensor to host memory, synchronously."""
        if name not in self.buffers:
            self.buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        copied = self.buffers[name]
        if not is_pinned_on(tensor.device) or not tensor.numel():
            return copied.copy_(tensor)
        self.staging = self.staging or Staging(tensor.device, BLOCK)
        self.staging.copy(tensor, copied)
        return copied


class Staging:
    """Double buffer in pinned memory: the GPU fills one block while the CPU drains the other."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.device = device
        self.blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned_on(device)) for _ in range(2)]

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy to a contiguous tensor in host memory."""
        size = len(self.blocks[0])
        chunks = zip(as_bytes(source).split(size), as_bytes(target).split(size), strict=True)
        waiting: tuple[Tensor, Tensor, torch.Event | None] | None = None
        for i, (device_bytes, host_bytes) in enumerate(chunks):
            block = self.blocks[i % 2][: len(host_bytes)].copy_(device_bytes, non_blocking=True)
            self.finish(waiting)
            waiting = block, host_bytes, self.event()
        self.finish(waiting)

    def event(self) -> torch.Event | None:
        """Event after the copies queued so far; None on the CPU."""
        if not is_pinned_on(self.device):
            return None
        event = torch.Event(self.device)
        event.record(torch.accelerator.current_stream(self.device))
        return event

    def finish(self, waiting: tuple[Tensor, Tensor, torch.Event | None] | None) -> None:
        """Copy a block to its target once the GPU has filled it."""
        if waiting is None:
            return
        block, host_bytes, event = waiting
        if event is not None:
            event.synchronize()
        host_bytes.copy_(block)


def as_bytes(tensor: Tensor) -> Tensor:
    """View of a tensor as bytes (N,); copies if it is not contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
