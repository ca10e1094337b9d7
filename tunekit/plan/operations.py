"""Number of operations of a step, which take the host time to launch, and buffers inside kernels of a GPU.

A plan runs the operations of the CPU on shapes. They are the same as those of a GPU, except that some operations of
tunekit are several kernels there.
"""

from functools import cache
from typing import Any, NamedTuple

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


class Operations(NamedTuple):
    """Numbers of operations in an interval of a step."""

    launches: int = 0  # kernels
    calls: int = 0  # operations of tunekit, which run Python
    matmuls: int = 0  # matmuls and attention, which no compiler fuses away

    def plus(self, other: "Operations", times: float = 1) -> "Operations":
        """The sum with another count, repeated."""
        return Operations(*(a + round(times * b) for a, b in zip(self, other, strict=True)))


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
