"""Bytes of live tensors and number of operations of a step, tracked through a dispatch mode.

The CPU launches the operations. A plan runs those of the CPU on shapes, the same as those of a GPU, except that
some operations of tunekit are several kernels there.
"""

import weakref
from collections.abc import Iterable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tunekit.plan import fake_tensors

# Not kernels: allocations and bookkeeping. Views are recognized by their schema.
FREE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "_unsafe_view", "lift_fresh",
    "_reshape_alias", "set", "resize", "is_same_size", "record_stream", "promote_types",
}  # fmt: skip
MATMULS = {
    "mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "nf4_matmul", "nf4_matmul_backward",
    "attention", "attention_backward",
}  # fmt: skip
# Kernels of one operation: dequantize and multiply; FlashAttention's backward pass has a first and a last kernel.
KERNELS = {"nf4_matmul": 2, "nf4_matmul_backward": 2, "attention_backward": 3}
TUNEKIT = "tunekit"  # namespace of operations that are called through Python
EXTRA_TOKENS = 128  # by which FlashAttention pads each document in its buffers
ROUNDED_DIM = 32  # multiple to which it pads heads
DEVICE = torch.ops.prim.device.default


class Operations(NamedTuple):
    """Numbers of operations in an interval of a step."""

    launches: int = 0  # kernels
    calls: int = 0  # operations of tunekit, which run Python
    matmuls: int = 0  # matmuls and attention, which no compiler fuses away

    def plus(self, other: "Operations", times: float = 1) -> "Operations":
        """The sum with another count, repeated."""
        return Operations(*(a + round(times * b) for a, b in zip(self, other, strict=True)))


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


@cache
def count(func: Any) -> Operations:
    """The kernels of one operation that torch dispatches."""
    name = func.name().partition("::")[2].partition(".")[0]
    base = name.rstrip("_")  # in place or not
    if func.namespace not in ("aten", TUNEKIT) or func.is_view or base in FREE:
        return Operations()
    is_python = func.namespace == TUNEKIT
    return Operations(KERNELS.get(base, 1), int(is_python), int(base in MATMULS))


def flash_workspace(func: Any, args: tuple[Any, ...]) -> int:
    """Bytes that FlashAttention 2 allocates inside its backward pass, 0 for all other operations.

    dQ and the row sums of dO * O are accumulated in fp32, over tokens and padding of each document; where several
    query heads read one head of keys, dK and dV have as many heads as the queries before they are added up.
    """
    if func.name() != f"{TUNEKIT}::attention_backward":
        return 0
    q, k, _, offsets, *_ = args[1]
    if q.dtype.itemsize != 2:  # FlexAttention computes fp32
        return 0
    tokens = q.shape[0] * q.shape[1] + EXTRA_TOKENS * (offsets.numel() - 1)
    heads, dim = q.shape[2], -(-q.shape[3] // ROUNDED_DIM) * ROUNDED_DIM
    sums = 4 * tokens * heads * (dim + 1)
    expanded = 2 * k.shape[0] * k.shape[1] * heads * k.shape[3] * q.dtype.itemsize
    return sums + (expanded if k.shape[2] != heads else 0)
