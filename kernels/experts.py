"""Products of rows with the weight of the expert that each row belongs to."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.kernels import shapes
from tunekit.kernels.compiler import uncompiled

ALIGNED = 16  # bytes: torch's grouped product wants rows of a multiple of these

# Where experts without rows get zeros: on Blackwell their gradients are what was in memory before (pytorch 172439).
CLEAN = {"cpu"}


def grouped(x: Tensor, weight: Tensor, sizes: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W[e]^T + b[e] for `x` (N, in) sorted by expert: (N, out).

    `weight` (E, out, in) and `bias` (E, out) may be of another dtype than `x`; `sizes` (E,) are the rows of each expert
    and add up to N.
    """
    if fits(x, weight):
        return Grouped.apply(x, weight, sizes, None if bias is None else bias.to(x.dtype))
    return reference(x, weight, sizes, bias)


@uncompiled  # how many rows each expert has differs in every batch
def reference(x: Tensor, weight: Tensor, sizes: Tensor, bias: Tensor | None = None) -> Tensor:
    """One product for each expert that has rows, and casts of the weights of just those."""
    parts, counts = [], even(len(x), len(sizes)) if shapes.alone() else sizes.tolist()
    biases = [None] * len(counts) if bias is None else bias.unbind()
    for part, w, b in zip(x.split(counts), weight.unbind(), biases, strict=True):
        if len(part):
            parts.append(F.linear(part, w.to(x.dtype), None if b is None else b.to(x.dtype)))
    return torch.cat(parts)


def even(rows: int, experts: int) -> list[int]:
    """Rows of each expert where all have about as many."""
    return [rows * (i + 1) // experts - rows * i // experts for i in range(experts)]


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's grouped product takes these. A cast of all experts for a few rows would cost more than it saves.

    On the CPU it is a loop as well, without the autograd graph of one: 5 to 20 % faster, and gradients of the weights
    are written in place, where the loop's are stacked from parts.
    """
    kinds = {torch.bfloat16}
    if shapes.device(x) == "cpu" and not torch.compiler.is_compiling():  # the compiler knows of no other dtype
        kinds = {weight.dtype} - {torch.float64}
    return x.dtype in kinds and not any(size * x.element_size() % ALIGNED for size in weight.shape[1:])


class Grouped(torch.autograd.Function):
    """Nothing here waits for the device: `sizes` are never read by the host."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sizes: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, sizes)
        y = F.grouped_mm(x, weight.to(x.dtype).mT, offs=ends(sizes))
        return y if bias is None else y.add_(bias.repeat_interleave(sizes, dim=0, output_size=len(x)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, sizes = ctx.saved_tensors
        grad = grads[0].contiguous()
        back = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            back = F.grouped_mm(grad, weight.to(x.dtype), offs=ends(sizes))
        if ctx.needs_input_grad[1]:
            of_weight = outer(grad, x, sizes).to(weight.dtype)
        if ctx.needs_input_grad[3]:
            # A product with ones adds rows up in fp32, and always in the same order.
            of_bias = outer(grad, x.new_ones(len(x), ALIGNED // x.element_size()), sizes)[..., 0]
        return back, of_weight, None, of_bias


def outer(a: Tensor, b: Tensor, sizes: Tensor) -> Tensor:
    """The sum of the outer products of the rows of each expert: (N, p) and (N, q) to (E, p, q)."""
    y = F.grouped_mm(a.mT, b, offs=ends(sizes))
    return y if shapes.device(y) in CLEAN else y.masked_fill_((sizes == 0)[:, None, None], 0)


def ends(sizes: Tensor) -> Tensor:
    return sizes.cumsum(0, dtype=torch.int32)


class Sorted(torch.autograd.Function):
    """Rows in another order. Its gradient is a gather too: an addition at places is slow, and on a GPU random."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


def by_expert(x: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """Rows of `x` (N, ...) in `order` (N,), a permutation, which `back` undoes."""
    return Sorted.apply(x, order, back)
