"""Copies of tensors in host memory, from which a state is written while training continues."""

from collections.abc import Mapping

import torch
from torch import Tensor

from tunekit.devices import is_pinned_on

BLOCK = 64 * 2**20  # bytes of a pinned block


class HostCopies:
    """Copies in pageable memory that is used again for the next state.

    Pinned copies would be faster, but torch rounds each up to a power of two bytes, and pinning takes 0.3 s a gigabyte
    when a run saves for the first time. Tensors of a GPU pass through two pinned blocks of fixed size instead.
    """

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}
        self.staging: Staging | None = None

    def missing(self, tensors: Mapping[str, Tensor]) -> int:
        """Bytes that copies of these tensors still have to allocate."""
        return sum(tensor.nbytes for name, tensor in tensors.items() if name not in self.buffers)

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """Copy of a tensor, complete when this returns."""
        if name not in self.buffers:
            self.buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        copied = self.buffers[name]
        if not is_pinned_on(tensor.device) or not tensor.numel():
            return copied.copy_(tensor)
        self.staging = self.staging or Staging(tensor.device, BLOCK)
        self.staging.copy(tensor, copied)
        return copied


class Staging:
    """Two blocks of pinned memory: while one is filled by the GPU, the other is emptied by the CPU."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.device = device
        self.blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned_on(device)) for _ in range(2)]

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy to a contiguous tensor on the host."""
        size = len(self.blocks[0])
        pieces = zip(as_bytes(source).split(size), as_bytes(target).split(size), strict=True)
        waiting: tuple[Tensor, Tensor, torch.Event | None] | None = None
        for i, (device_bytes, host_bytes) in enumerate(pieces):
            block = self.blocks[i % 2][: len(host_bytes)].copy_(device_bytes, non_blocking=True)
            self.finish(waiting)
            waiting = block, host_bytes, self.event()
        self.finish(waiting)

    def event(self) -> torch.Event | None:
        """An event after the copies that the GPU was given; nothing to wait for on the CPU."""
        if not is_pinned_on(self.device):
            return None
        event = torch.Event(self.device)
        event.record(torch.accelerator.current_stream(self.device))
        return event

    def finish(self, waiting: tuple[Tensor, Tensor, torch.Event | None] | None) -> None:
        """Move a block to its place as soon as the GPU has filled it."""
        if waiting is None:
            return
        block, host_bytes, event = waiting
        if event is not None:
            event.synchronize()
        host_bytes.copy_(block)


def as_bytes(tensor: Tensor) -> Tensor:
    """Memory of a tensor; of a copy where it is not contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
