"""Activation offloading: saved tensors are copied to host memory and prefetched for the backward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from tunekit.devices import is_pinned_on

MIN_OFFLOAD_BYTES = 2**20  # smaller tensors stay on the device
PREFETCH_COUNT = 16  # tensors that are copied back in advance


class ActivationOffloader:
    """Offloads saved tensors of layers. Copies overlap with compute on a separate stream.

    torch.autograd.graph.save_on_cpu synchronizes each copy with the compute stream.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.stream, self.last = model, None, None
        # Tensors of the current layer: many operations save the same tensor
        self.offloaded: dict[tuple, tuple[Tensor, OffloadedTensor]] = {}
        self.weights = Addresses(model)  # of the current layer

    def wrap_layer_call(self, through: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wrap a function that calls a layer, so that saved tensors are offloaded."""

        def run(layer: nn.Module, *inputs: Any) -> Tensor:
            self.weights = Addresses(layer)
            with saved_tensors_hooks(self.pack, self.unpack):
                out = through(layer, *inputs)
            self.offloaded.clear()
            return out

        return run

    def pack(self, x: Tensor) -> "Tensor | OffloadedTensor":
        if x.nbytes < MIN_OFFLOAD_BYTES or x in self.weights:  # or a view of one
            return x
        key = x.data_ptr(), x._version, x.dtype, x.shape, x.stride()
        if key not in self.offloaded:
            self.stream = self.stream or torch.get_device_module(x.device).Stream()
            self.last = OffloadedTensor(x, self.stream, self.last)
            self.offloaded[key] = x, self.last  # keeps x alive, so that its address is not reused
        return self.offloaded[key][1]

    def unpack(self, saved: "Tensor | OffloadedTensor") -> Tensor:
        self.last = None  # the next forward pass starts a new chain
        return saved if isinstance(saved, Tensor) else saved.restore()


class Addresses:
    """Memory addresses of the parameters and buffers of a layer, while it runs.

    FSDP gathers weights at new addresses each time a layer starts, and expert weights only when they are called.
    The layer is searched again as long as some weights are sharded.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer, self.known, self.is_complete = layer, set[int](), False

    def __contains__(self, x: Tensor) -> bool:
        address = x.untyped_storage().data_ptr()
        if address not in self.known and not self.is_complete:
            self.search()
        return address in self.known

    def search(self) -> None:
        """Add the addresses of tensors that are currently not sharded."""
        tensors = [*self.layer.parameters(), *self.layer.buffers()]
        local = [tensor for tensor in tensors if not isinstance(tensor, DTensor)]
        self.known.update(tensor.untyped_storage().data_ptr() for tensor in local)
        self.is_complete = len(local) == len(tensors)


class OffloadedTensor:
    """Tensor in host memory. torch caches pinned memory, so nothing is allocated after the first step."""

    def __init__(self, x: Tensor, stream: Any, previous: "OffloadedTensor | None") -> None:
        self.gpu, self.device, self.stream = torch.get_device_module(x.device), x.device, stream
        self.previous = previous
        self.on_device: Tensor | None = None
        self.ready: Any = None
        self.host = torch.empty_like(x, device="cpu", pin_memory=is_pinned_on(x.device))
        stream.wait_stream(self.gpu.current_stream())
        with self.gpu.stream(stream):
            self.host.copy_(x.detach(), non_blocking=True)
        record_stream(x, stream)

    def fetch(self) -> None:
        """Start copying the tensor to the device, unless the copy was started before."""
        if self.on_device is None:
            with self.gpu.stream(self.stream):
                self.on_device = torch.empty_like(self.host, device=self.device)
                self.on_device.copy_(self.host, non_blocking=True)
                self.ready = self.stream.record_event()

    def restore(self) -> Tensor:
        """Tensor on the device. Also starts the copies of the tensors that the backward pass needs next."""
        tensor = self
        for _ in range(PREFETCH_COUNT + 1):
            if tensor is not None:
                tensor.fetch()
                tensor = tensor.previous
        current = self.gpu.current_stream()
        current.wait_event(self.ready)
        assert self.on_device is not None
        record_stream(self.on_device, current)
        return self.on_device


def record_stream(x: Tensor, stream: Any) -> None:
    """Prevent reuse of the memory of `x` before the work queued on the stream has finished."""
    if is_pinned_on(x.device):  # the stream is a different one
        x.record_stream(stream)
