"""What a layer keeps for its backward pass waits in the memory of the host, and is brought back in time."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from tunekit.devices import is_pinned_on

LEAST = 2**20  # bytes of a tensor that is worth the way
AHEAD = 16  # tensors that are on their way back before they are asked for


class ActivationOffloader:
    """Copies run on a stream of their own beside the work: torch's own hooks let every product wait for them."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.stream, self.last = model, None, None
        self.known: dict[
            tuple, tuple[Tensor, OffloadedTensor]
        ] = {}  # of this layer: many operations keep the same tensor
        self.weights = Addresses(model)  # of the layer that runs

    def around(self, through: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The same way to call a layer, with all that it keeps on the host."""

        def run(layer: nn.Module, *inputs: Any) -> Tensor:
            self.weights = Addresses(layer)
            with saved_tensors_hooks(self.pack, self.unpack):
                out = through(layer, *inputs)
            self.known.clear()
            return out

        return run

    def pack(self, x: Tensor) -> "Tensor | OffloadedTensor":
        if x.nbytes < LEAST or self.is_weight(x):
            return x
        key = x.data_ptr(), x._version, x.dtype, x.shape, x.stride()
        if key not in self.known:
            self.stream = self.stream or torch.get_device_module(x.device).Stream()
            self.last = OffloadedTensor(x, self.stream, self.last)
            self.known[key] = x, self.last  # with x alive, nothing else can get its address
        return self.known[key][1]

    def unpack(self, kept: "Tensor | OffloadedTensor") -> Tensor:
        self.last = None  # the next forward pass begins a chain of its own
        return kept if isinstance(kept, Tensor) else kept.back()

    def is_weight(self, x: Tensor) -> bool:
        """Whether a tensor is a weight or a view of one. These stay on the device in any case."""
        return x in self.weights


class Addresses:
    """Memory addresses of the parameters and buffers of a layer, while it runs.

    FSDP gathers weights when the layer begins, at other addresses each time, and those of experts only when they are
    called: as long as some are still sharded, the layer is searched again.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer, self.known, self.is_complete = layer, set[int](), False

    def __contains__(self, x: Tensor) -> bool:
        address = x.untyped_storage().data_ptr()
        if address not in self.known and not self.is_complete:
            self.search()
        return address in self.known

    def search(self) -> None:
        """Add the tensors that are not sharded at the moment."""
        tensors = [*self.layer.parameters(), *self.layer.buffers()]
        local = [tensor for tensor in tensors if not isinstance(tensor, DTensor)]
        self.known.update(tensor.untyped_storage().data_ptr() for tensor in local)
        self.is_complete = len(local) == len(tensors)


class OffloadedTensor:
    """A tensor on the host. torch keeps pinned memory for the next one, so none is made anew after the first step."""

    def __init__(self, x: Tensor, stream: Any, before: "OffloadedTensor | None") -> None:
        self.gpu, self.device, self.stream, self.before = torch.get_device_module(x.device), x.device, stream, before
        self.here: Tensor | None = None
        self.ready: Any = None
        self.host = torch.empty_like(x, device="cpu", pin_memory=is_pinned_on(x.device))
        stream.wait_stream(self.gpu.current_stream())
        with self.gpu.stream(stream):
            self.host.copy_(x.detach(), non_blocking=True)
        lend(x, stream)

    def fetch(self) -> None:
        """Set out for the way back."""
        if self.here is None:
            with self.gpu.stream(self.stream):
                self.here = torch.empty_like(self.host, device=self.device)
                self.here.copy_(self.host, non_blocking=True)
                self.ready = self.stream.record_event()

    def back(self) -> Tensor:
        """The tensor, and those that will be asked for next are on their way."""
        one = self
        for _ in range(AHEAD + 1):
            if one is not None:
                one.fetch()
                one = one.before
        current = self.gpu.current_stream()
        current.wait_event(self.ready)
        assert self.here is not None
        lend(self.here, current)
        return self.here


def lend(x: Tensor, stream: Any) -> None:
    """The memory of `x` is not given to others before the stream has done what it was told so far."""
    if is_pinned_on(x.device):  # of another stream, then
        x.record_stream(stream)
