"""Linear layers with low-rank updates, x W^T + b + s (x A^T) B^T: the base product and the update in one place.

Layers that read the same `x` are taken together: their A is one product of `x`, and so is its gradient. An update is
added in place to what the base product made, and its gradient to what the base gave back. Kept for the backward pass
is `x`, or what it is cheaply made of, and with dropout a byte for each number of it; what has the rank for a size is
made again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.kernels.recompute import RecomputeSource, recompute_source
from tunekit.kernels.torch_compile import disable_compile

CPU_CHUNK_SIZE, GPU_CHUNK_SIZE = 2**19, 2**25  # numbers of a weight in fp32 at once: as many as a cache holds, or a GPU does not notice

CASTS_PRODUCTS = torch.version.hip is None  # whether mm takes `out_dtype`: cuBLAS writes sums of bf16 products as fp32


class BaseLinear(Protocol):
    """A layer whose weight (out, in) is frozen, however it is kept. `frozen` says whether it really is."""

    @property
    def effective_bias(self) -> Any:
        """The bias (out,), or None."""
        ...

    @property
    def is_frozen(self) -> bool: ...

    def matmul(self, x: Tensor) -> Tensor:
        """x W^T + b, in memory of its own."""
        ...

    def matmul_backward(self, grad: Tensor, into: Tensor | None) -> Tensor:
        """grad W of `grad` (N, out), added to `into` (N, in) if that is there."""
        ...

    def iter_fp32_rows(self, num_rows: int) -> Iterable[Tensor]:
        """W in fp32, so many rows at a time."""
        ...


@dataclass(frozen=True, eq=False)
class LoRAWeights:
    """s B A of a layer, less s B0 A0 if it did not begin at zero."""

    base: BaseLinear
    scale: float
    a: Tensor  # (rank, in)
    b: Tensor  # (out, rank)
    a0: Tensor | None = None
    b0: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.a, self.b, self.a0, self.b0, self.base.effective_bias


def lora_linear(x: Tensor, updates: Sequence[LoRAWeights], dropout: float = 0.0) -> tuple[Tensor, ...]:
    """What each layer makes of `x` (..., in); `dropout` is the share of `x` that an update does not see."""
    if dropout and len(updates) > 1:  # each draws a mask of its own, so that there is no product to share
        return tuple(y for update in updates for y in lora_linear(x, (update,), dropout))
    if torch.compiler.is_compiling() or not all(update.base.is_frozen for update in updates):
        return lora_linear_reference(x, updates, dropout)
    tensors = (tensor for update in updates for tensor in update.tensors)
    scales = tuple(u.scale / (1 - dropout) for u in updates)  # what dropout leaves grows, and here by the way
    return LoRALinearFunction.apply(tuple(u.base for u in updates), scales, dropout, recompute_source(x), x, *tensors)


def lora_linear_reference(x: Tensor, updates: Sequence[LoRAWeights], dropout: float = 0.0) -> tuple[Tensor, ...]:
    """The same in plain torch: for the compiler, which finds out by itself what to keep, and for trained weights."""
    a, bs, places = stack_factors([u.tensors for u in updates], [u.scale for u in updates], x.dtype)
    low = F.linear(F.dropout(x, dropout), a)
    parts = zip(updates, bs, places, strict=True)
    return tuple(update.base.matmul(x) + F.linear(low[..., place], b) for update, b, place in parts)


def stack_factors(
    updates: Sequence[Sequence[Any]], scales: Iterable[float], dtype: torch.dtype
) -> tuple[Tensor, list[Tensor], list[slice]]:
    """All A in one (R, in); for each layer s B, rounded once, and which columns of x A^T (N, R) are for it."""
    stacked, bs = [], []
    for (a, b, a0, b0, _), scale in zip(updates, scales, strict=True):
        if b0 is not None:
            b = torch.cat([b, -b0], dim=1)
        stacked += [part for part in (a, a0) if part is not None]
        bs.append((b * scale).to(dtype))
    whole = stacked[0] if len(stacked) == 1 else torch.cat(stacked)
    return whole.to(dtype), bs, consecutive_slices([b.shape[1] for b in bs])


def consecutive_slices(sizes: Iterable[int]) -> list[slice]:
    """Slices of these sizes, one after the other from 0."""
    ends = list(accumulate(sizes, initial=0))
    return [slice(start, end) for start, end in pairwise(ends)]


class Factors(NamedTuple):
    """A and B of layers with the same input, in the dtype of the products."""

    a: Tensor  # (R, in): the A of all layers, stacked
    b: list[Tensor]  # (out, rank) by layer, without the scale
    columns: list[slice]  # of x A^T (N, R) by layer


def cast_factors(updates: Sequence[Sequence[Any]], dtype: torch.dtype) -> Factors:
    """Stack and cast the factors of all layers with one operator, which is a single kernel on a GPU."""
    stacked = [a for first, _, start, *_ in updates for a in (first, start) if a is not None]
    b = [b if start is None else torch.cat([b, -start], dim=1) for _, b, _, start, _ in updates]
    columns = consecutive_slices(part.shape[1] for part in b)
    if all(part.dtype == dtype for part in (*stacked, *b)):
        return Factors(stacked[0] if len(stacked) == 1 else torch.cat(stacked), b, columns)
    a = stacked[0].new_empty(columns[-1].stop, stacked[0].shape[1], dtype=dtype)
    cast_b = [torch.empty_like(part, dtype=dtype) for part in b]
    targets = [*a.split([len(part) for part in stacked]), *cast_b]
    torch._foreach_copy_(targets, [*stacked, *b])  # pyright: ignore[reportPrivateImportUsage]
    return Factors(a, cast_b, columns)


class LoRALinearFunction(torch.autograd.Function):
    """`tensors` are five for each layer, as Update.tensors has them.

    The scale is a factor of products and never a kernel of its own.
    """

    @staticmethod
    def forward(  # noqa: PLR0913 (a function of autograd takes what it is applied to, one by one)
        ctx: Any,
        bases: Sequence[BaseLinear],
        scales: Sequence[float],
        dropout: float,
        origin: RecomputeSource,
        x: Tensor,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        updates = group_by_layer(tensors)
        factors = cast_factors(updates, x.dtype)
        rows, mask = x.flatten(0, -2), None
        dropped = rows
        if dropout:
            noise = torch.empty_like(rows).bernoulli_(1 - dropout)  # as F.dropout draws
            dropped, mask = rows * noise, noise.bool()
        low, outputs = dropped @ factors.a.T, []
        for base, scale, b, columns in zip(bases, scales, *factors[1:], strict=True):
            y = base.matmul(rows).addmm_(low[:, columns], b.T, alpha=scale)
            # What is a view when it leaves a function may not be changed in place any more.
            outputs.append(torch.ops.aten._unsafe_view(y, [*x.shape[:-1], len(b)]))
        ctx.bases, ctx.scales, ctx.make = bases, scales, origin.make
        ctx.save_for_backward(mask, *(t for update in updates for t in (*update[:4], None)), *origin.inputs)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mask, *tensors = ctx.saved_tensors
        count = 5 * len(ctx.bases)
        x, updates = ctx.make(*tensors[count:]), group_by_layer(tensors[:count])
        rows = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        factors = cast_factors(updates, x.dtype)
        noise = None if mask is None else mask.to(x.dtype)
        dropped = x.flatten(0, -2) if noise is None else x.flatten(0, -2) * noise
        low, low_grad = scaled_low(dropped, factors, ctx.scales), dropped.new_empty(len(dropped), len(factors.a))
        found: list[Tensor | None] = []
        exact = torch.promote_types(x.dtype, torch.float32)
        for i, (grad, b, columns) in enumerate(zip(rows, *factors[1:], strict=True)):
            low_grad[:, columns].addmm_(grad, b, beta=0, alpha=ctx.scales[i])
            trained = updates[i][1]
            of_b = transposed_product(grad, low[:, columns][:, : trained.shape[1]], trained.dtype)
            bias = grad.sum(0, dtype=exact) if ctx.needs_input_grad[5 + 5 * i + 4] else None
            found += [None, of_b, None, None, bias]
        of_a = transposed_product(low_grad, dropped, updates[0][0].dtype)
        for i, (columns, (first, *_)) in enumerate(zip(factors.columns, updates, strict=True)):
            found[5 * i] = of_a[columns][: len(first)].to(first.dtype)
        back = input_gradient(ctx.bases, rows, low_grad, factors.a, noise) if ctx.needs_input_grad[4] else None
        return None, None, None, None, None if back is None else back.view_as(x), *found


def scaled_low(x: Tensor, factors: Factors, scales: Sequence[float]) -> Tensor:
    """s x A^T (N, R), with the scale of each layer."""
    first, *others = scales
    low = x.new_empty(len(x), len(factors.a)).addmm_(x, factors.a.T, beta=0, alpha=first)
    for scale, columns in zip(others, factors.columns[1:], strict=True):
        if scale != first:
            low[:, columns].mul_(scale / first)
    return low


def transposed_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left^T right of (N, p) and (N, q): (p, q) in `dtype`, contiguous as a gradient must be."""
    if dtype == torch.float32 != left.dtype and left.device.type == "cuda" and CASTS_PRODUCTS and len(left):
        return torch.mm(left.T, right, out_dtype=dtype)
    if left.shape[1] < right.shape[1] or left.device.type == "cuda":
        return (left.T @ right).to(dtype)
    # Long rows first: on a CPU the other order takes half as long again.
    return (right.T @ left).T.to(dtype).contiguous()


def input_gradient(
    bases: Sequence[BaseLinear], rows: Sequence[Tensor], low_grad: Tensor, a: Tensor, noise: Tensor | None
) -> Tensor:
    """The gradient of `x`: all layers add to the same memory."""
    back = None
    for base, grad in zip(bases, rows, strict=True):
        back = base.matmul_backward(grad, back)
    assert back is not None
    return back.addmm_(low_grad, a) if noise is None else back.addcmul_(low_grad @ a, noise)


def group_by_layer(tensors: Sequence[Any]) -> list[Sequence[Any]]:
    """Those of each layer."""
    return [tensors[i : i + 5] for i in range(0, len(tensors), 5)]


@disable_compile  # decoding is no operator, and nothing here is learnt
@torch.no_grad()
def lora_row_norms(update: LoRAWeights) -> Tensor:
    """Norms (out,) of the rows of a weight with its update in fp32, of which no more than some are there at a time."""
    a, (b,), _ = stack_factors([update.tensors], [update.scale], torch.float32)
    rows = max(1, (CPU_CHUNK_SIZE if a.device.type == "cpu" else GPU_CHUNK_SIZE) // a.shape[1])
    parts = zip(update.base.iter_fp32_rows(rows), b.split(rows), strict=True)
    return torch.cat([torch.addmm(part, some, a).norm(dim=1) for part, some in parts])
