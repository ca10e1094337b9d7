"""Tracking of the bytes of live tensors through a dispatch mode."""

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tunekit.plan import fake_tensors
from tunekit.plan.operations import Operations, count, flash_workspace

DEVICE = torch.ops.prim.device.default
NO_OPERATIONS = Operations()


class MemoryTracker(TorchDispatchMode):
    """Current bytes of live tensors, and their peak since `mark`. Works for real and for fake tensors.

    With `flash`, buffers inside the attention kernels of a GPU are counted too.
    """

    def __init__(self, flash: bool = False) -> None:
        super().__init__()
        self.flash, self.operations = flash, Operations()
        self.bytes = self.peak = 0
        self.known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and isinstance(args[0], FakeTensor) and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # half of all calls
        outputs = fake_tensors.call_operation(func, args, kwargs or {})
        if isinstance(outputs, Tensor):
            self.record((outputs,))
        else:
            self.record(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))
        if (operations := count(func)) != NO_OPERATIONS:
            self.operations = self.operations.plus(operations)
        if self.flash:
            self.peak = max(self.peak, self.bytes + flash_workspace(func, args))
        return outputs

    def record(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of tensors, each once."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self.known and size:
                self.known[key] = weakref.ref(storage, partial(self.forget, key, size))
                self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def forget(self, key: int, size: int, _: Any) -> None:
        """Subtract a storage that was freed."""
        del self.known[key]
        self.bytes -= size

    def mark(self) -> int:
        """Return the peak since the last call, and reset it."""
        peak, self.peak = self.peak, self.bytes
        return peak
