"""Products of rows with the weight of the expert that each row belongs to."""

import importlib
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.kernels import fake_mode
from tunekit.kernels.torch_compile import assume_constant_result, disable_compile
from tunekit.kernels.triton_support import uses_triton

ALIGNMENT = 16  # bytes: torch's grouped product wants rows of a multiple of these

# Where experts without rows get zeros: on Blackwell their gradients are what was in memory before (pytorch 172439).
ZERO_FILLED = {"cpu"}

# Generations of GPUs for which torch has a kernel. On others it is a loop over experts that waits for their sizes.
FUSED = {9, 10}
BF16_TENSOR_CORES = 8  # the first generation that has them: before, Triton would multiply number by number


def grouped_mm(x: Tensor, weight: Tensor, sizes: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W[e]^T + b[e] for `x` (N, in) sorted by expert: (N, out).

    `weight` (E, out, in) and `bias` (E, out) may be of another dtype than `x`; `sizes` (E,) are the rows of each expert
    and add up to N.
    """
    if is_supported(x, weight):
        return GroupedMM.apply(x, weight, sizes, None if bias is None else bias.to(x.dtype))
    return reference(x, weight, sizes, bias)


@disable_compile  # how many rows each expert has differs in every batch
def reference(x: Tensor, weight: Tensor, sizes: Tensor, bias: Tensor | None = None) -> Tensor:
    """One product for each expert that has rows, and casts of the weights of just those."""
    parts, counts = [], even_split(len(x), len(sizes)) if fake_mode.is_fake() else sizes.tolist()
    biases = [None] * len(counts) if bias is None else bias.unbind()
    for part, w, b in zip(x.split(counts), weight.unbind(), biases, strict=True):
        if len(part):
            parts.append(F.linear(part, w.to(x.dtype), None if b is None else b.to(x.dtype)))
    return torch.cat(parts)


def even_split(rows: int, experts: int) -> list[int]:
    """Rows of each expert where all have about as many."""
    return [rows * (i + 1) // experts - rows * i // experts for i in range(experts)]


def is_supported(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's grouped product takes these. A cast of all experts for a few rows would cost more than it saves.

    On the CPU it is a loop as well, without the autograd graph of one: 5 to 20 % faster, and gradients of the weights
    are written in place, where the loop's are stacked from parts.
    """
    kinds = {torch.bfloat16}
    if fake_mode.device_type(x) == "cpu" and not torch.compiler.is_compiling():  # the compiler knows of no other dtype
        kinds = {weight.dtype} - {torch.float64}
    return x.dtype in kinds and not any(size * x.element_size() % ALIGNMENT for size in weight.shape[1:])


class GroupedMM(torch.autograd.Function):
    """Nothing here waits for the device: `sizes` are never read by the host."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sizes: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, sizes)
        y = multiply_groups(x, weight.to(x.dtype).mT, group_ends(sizes))
        return y if bias is None else y.add_(bias.repeat_interleave(sizes, dim=0, output_size=len(x)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, sizes = ctx.saved_tensors
        grad = grads[0].contiguous()
        back = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            back = multiply_groups(grad, weight.to(x.dtype), group_ends(sizes))
        if ctx.needs_input_grad[1]:
            of_weight = grouped_outer(grad, x, sizes).to(weight.dtype)
        if ctx.needs_input_grad[3]:
            # A product with ones adds rows up in fp32, and always in the same order.
            of_bias = grouped_outer(grad, x.new_ones(len(x), ALIGNMENT // x.element_size()), sizes)[..., 0]
        return back, of_weight, None, of_bias


def grouped_outer(a: Tensor, b: Tensor, sizes: Tensor) -> Tensor:
    """The sum of the outer products of the rows of each expert: (N, p) and (N, q) to (E, p, q)."""
    if needs_triton(a):
        return gpu().grouped_outer(a, b, group_ends(sizes))
    y = F.grouped_mm(a.mT, b, offs=group_ends(sizes))
    return y if fake_mode.device_type(y) in ZERO_FILLED else y.masked_fill_((sizes == 0)[:, None, None], 0)


def multiply_groups(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x W[e] of rows (N, in) up to each of `ends` (E,) and `weight` (E, in, out)."""
    return gpu().grouped_product(x, weight, ends) if needs_triton(x) else F.grouped_mm(x, weight, offs=ends)


def needs_triton(x: Tensor) -> bool:
    """Whether torch's grouped product is a loop that waits for the device, and Triton's can replace it."""
    return not torch.compiler.is_compiling() and uses_triton(x) and prefers_triton(generation(x.device))


def prefers_triton(generation: int) -> bool:
    """Whether Triton's grouped product is better than torch's on GPUs of a generation."""
    return generation >= BF16_TENSOR_CORES and generation not in FUSED


@assume_constant_result
def generation(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


@cache
def gpu() -> Any:
    return importlib.import_module("tunekit.kernels.grouped_mm_triton")


def group_ends(sizes: Tensor) -> Tensor:
    return sizes.cumsum(0, dtype=torch.int32)


class PermuteRows(torch.autograd.Function):
    """Rows in another order. Its gradient is a gather too: an addition at places is slow, and on a GPU random."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


def permute_rows(x: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """Rows of `x` (N, ...) in `order` (N,), a permutation, which `back` undoes."""
    return PermuteRows.apply(x, order, back)


class GatherCopies(torch.autograd.Function):
    """Copies of rows in an order, with one gather; the gradient is a gather and a sum over the copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.shape = len(x), copies
        return x.index_select(0, order // copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows = grads[0].index_select(0, ctx.saved_tensors[0])
        return rows.unflatten(0, ctx.shape).sum(1), None, None, None


def copy_by_expert(x: Tensor, order: Tensor, back: Tensor, copies: int) -> Tensor:
    """Rows of `x` (T, ...), each repeated `copies` times, in `order` (T * copies,), which `back` undoes."""
    return GatherCopies.apply(x, order, back, copies)


def invert(order: Tensor) -> Tensor:
    """The permutation that undoes another one, without a second sort."""
    return torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
