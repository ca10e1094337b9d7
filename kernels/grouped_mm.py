"""Grouped matmul: each row is multiplied by the weight of its expert."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.kernels import fake_mode
from tunekit.kernels.torch_compile import assume_constant_result, disable_compile
from tunekit.kernels.triton_support import triton_kernels, uses_triton

ALIGNMENT = 16  # bytes; torch's grouped_mm needs rows of a multiple of this size

# Device types that write zeros for experts without rows. On Blackwell gradients are uninitialized (pytorch 172439).
ZERO_FILLED = {"cpu"}

# Major compute capabilities for which torch has a kernel. On others, a loop over experts synchronizes to read sizes.
FUSED = {9, 10}
BF16_TENSOR_CORES = 8  # first major compute capability with bf16 tensor cores


def grouped_mm(x: Tensor, weight: Tensor, sizes: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W[e]^T + b[e] (N, out) for rows `x` (N, in) sorted by expert e.

    `sizes` (E,) are the numbers of rows per expert and add up to N. `weight` (E, out, in) and `bias` (E, out) may have
    another dtype than `x`.
    """
    if is_supported(x, weight):
        return GroupedMM.apply(x, weight, sizes, None if bias is None else bias.to(x.dtype))
    return reference(x, weight, sizes, bias)


def matmul(x: Tensor, weight: Tensor, sizes: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, or `grouped_mm` if `sizes` is given."""
    return F.linear(x, weight, bias) if sizes is None else grouped_mm(x, weight, sizes, bias)


@disable_compile  # the number of rows per expert differs from batch to batch
def reference(x: Tensor, weight: Tensor, sizes: Tensor, bias: Tensor | None = None) -> Tensor:
    """Torch reference: one matmul per expert with rows; only weights of these experts are cast."""
    outputs, counts = [], even_split(len(x), len(sizes)) if fake_mode.is_fake() else sizes.tolist()
    biases = [None] * len(counts) if bias is None else bias.unbind()
    for rows, w, b in zip(x.split(counts), weight.unbind(), biases, strict=True):
        if len(rows):
            outputs.append(F.linear(rows, w.to(x.dtype), None if b is None else b.to(x.dtype)))
    return torch.cat(outputs)


def even_split(rows: int, experts: int) -> list[int]:
    """Numbers of rows per expert, as equal as possible."""
    return [rows * (i + 1) // experts - rows * i // experts for i in range(experts)]


def is_supported(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's grouped_mm is used. Casting all experts for few rows would cost more than it saves.

    On a CPU it is a loop as well, but without its autograd graph: 5 to 20% faster, and weight gradients are written in
    place instead of being stacked.
    """
    dtypes = {torch.bfloat16}
    if fake_mode.device_type(x) == "cpu" and not torch.compiler.is_compiling():  # torch.compile only supports bf16
        dtypes = {weight.dtype} - {torch.float64}
    return x.dtype in dtypes and not any(size * x.element_size() % ALIGNMENT for size in weight.shape[1:])


class GroupedMM(torch.autograd.Function):
    """Autograd function of `grouped_mm`. Does not synchronize: `sizes` stay on the device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sizes: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, sizes)
        y = multiply_groups(x, weight.to(x.dtype).mT, group_ends(sizes))
        return y if bias is None else y.add_(bias.repeat_interleave(sizes, dim=0, output_size=len(x)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, sizes = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = multiply_groups(grad, weight.to(x.dtype), group_ends(sizes))
        if ctx.needs_input_grad[1]:
            grad_weight = grouped_outer(grad, x, sizes).to(weight.dtype)
        if ctx.needs_input_grad[3]:
            # A matmul with ones sums rows in fp32 and in a deterministic order.
            grad_bias = grouped_outer(grad, x.new_ones(len(x), ALIGNMENT // x.element_size()), sizes)[..., 0]
        return grad_x, grad_weight, None, grad_bias


def grouped_outer(a: Tensor, b: Tensor, sizes: Tensor) -> Tensor:
    """a[e]^T b[e] (E, p, q) over the rows of each expert e, for (N, p) and (N, q)."""
    if needs_triton(a):
        return triton_kernels("grouped_mm").grouped_outer(a, b, group_ends(sizes))
    y = F.grouped_mm(a.mT, b, offs=group_ends(sizes))
    return y if fake_mode.device_type(y) in ZERO_FILLED else y.masked_fill_((sizes == 0)[:, None, None], 0)


def multiply_groups(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x W[e] (N, out) for rows (N, in) sorted by expert. `ends` (E,) are cumulative sizes, `weight` is (E, in, out)."""
    if needs_triton(x):
        return triton_kernels("grouped_mm").grouped_product(x, weight, ends)
    return F.grouped_mm(x, weight, offs=ends)


def needs_triton(x: Tensor) -> bool:
    """Whether torch's grouped_mm would synchronize in a loop, and the Triton kernel can replace it."""
    return not torch.compiler.is_compiling() and uses_triton(x) and prefers_triton(generation(x.device))


def prefers_triton(generation: int) -> bool:
    """Whether the Triton kernel is faster than torch's grouped_mm for this major compute capability."""
    return generation >= BF16_TENSOR_CORES and generation not in FUSED


@assume_constant_result
def generation(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


def group_ends(sizes: Tensor) -> Tensor:
    return sizes.cumsum(0, dtype=torch.int32)


class PermuteRows(torch.autograd.Function):
    """Permutation of rows. Its gradient is a gather: index_add is slow, and not deterministic on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


def permute_rows(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Permute the rows of `x` (N, ...) by `order` (N,); `inverse` is the inverse permutation."""
    return PermuteRows.apply(x, order, inverse)


class GatherCopies(torch.autograd.Function):
    """Permuted copies of rows by one gather. The gradient is a gather and a sum over the copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.shape = len(x), copies
        return x.index_select(0, order // copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows = grads[0].index_select(0, ctx.saved_tensors[0])
        return rows.unflatten(0, ctx.shape).sum(1), None, None, None


def copy_by_expert(x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
    """Repeat each row of `x` (T, ...) `copies` times and permute by `order` (T * copies,), the inverse of `inverse`."""
    return GatherCopies.apply(x, order, inverse, copies)


def invert(order: Tensor) -> Tensor:
    """Inverse of a permutation, without a second sort."""
    return torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
