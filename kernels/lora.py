"""Linear layers with LoRA: y = x W^T + b + s (x A^T) B^T, with one autograd function for base layer and update.

Layers with the same input `x` share one matmul for all A, in the forward and the backward pass. Updates are added in
place to the outputs of the base layers, and their gradients to those of the base layers. The backward pass needs `x`,
or the tensors from which `x` can be recomputed cheaply, and with dropout a mask of one byte per element; tensors of
size rank are recomputed.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.kernels.recompute import RecomputeSource, recompute_source
from tunekit.kernels.torch_compile import disable_compile

CPU_CHUNK_SIZE, GPU_CHUNK_SIZE = 2**19, 2**25  # fp32 values of a weight at a time; the CPU chunk fits into the cache

CASTS_PRODUCTS = torch.version.hip is None  # torch.mm supports `out_dtype`: cuBLAS writes bf16 products as fp32


class BaseLinear(Protocol):
    """Linear layer with a weight (out, in) in any storage format, which is usually frozen."""

    @property
    def effective_bias(self) -> Any:
        """The bias (out,), or None."""
        ...

    @property
    def is_frozen(self) -> bool: ...

    def matmul(self, x: Tensor) -> Tensor:
        """x W^T + b, in newly allocated memory."""
        ...

    def matmul_backward(self, grad: Tensor, into: Tensor | None) -> Tensor:
        """grad W for `grad` (N, out), added in place to `into` (N, in) if given."""
        ...

    def iter_fp32_rows(self, num_rows: int) -> Iterable[Tensor]:
        """W in fp32, `num_rows` rows at a time."""
        ...


@dataclass(frozen=True, eq=False)
class LoRAWeights:
    """Update s B A of a layer, or s (B A - B0 A0) with initial factors A0 and B0 (PiSSA)."""

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
    """Outputs x W^T + b + s (dropout(x) A^T) B^T (..., out) of adapted layers that share the input `x` (..., in)."""
    if dropout and len(updates) > 1:  # each layer has its own mask, so that there is no shared matmul
        return tuple(y for update in updates for y in lora_linear(x, (update,), dropout))
    if torch.compiler.is_compiling() or not all(update.base.is_frozen for update in updates):
        return lora_linear_reference(x, updates, dropout)
    bases = tuple(u.base for u in updates)
    scales = tuple(u.scale / (1 - dropout) for u in updates)  # includes the rescaling of dropout
    if not torch.is_grad_enabled() and not dropout:
        cache, tensors = FACTOR_CACHE.get(), [update.tensors for update in updates]
        factors = cast_factors(tensors, x.dtype) if cache is None else cache.get(tensors, x.dtype)
        rows = x.flatten(0, -2)
        return add_updates(bases, scales, rows, rows @ factors.a.T, factors, x.shape[:-1])
    tensors = (tensor for update in updates for tensor in update.tensors)
    return LoRALinearFunction.apply(bases, scales, dropout, recompute_source(x), x, *tensors)


def lora_linear_reference(x: Tensor, updates: Sequence[LoRAWeights], dropout: float = 0.0) -> tuple[Tensor, ...]:
    """Torch reference of `lora_linear`; used under torch.compile, which decides what to save, and if W is trained."""
    a, bs, columns = stack_factors([u.tensors for u in updates], [u.scale for u in updates], x.dtype)
    low = F.linear(F.dropout(x, dropout), a)
    layers = zip(updates, bs, columns, strict=True)
    return tuple(update.base.matmul(x) + F.linear(low[..., layer_columns], b) for update, b, layer_columns in layers)


def stack_factors(
    updates: Sequence[Sequence[Any]], scales: Iterable[float], dtype: torch.dtype
) -> tuple[Tensor, list[Tensor], list[slice]]:
    """Stack the A of all layers to (R, in). Also returns s B of each layer, rounded once, and its columns of x A^T."""
    stacked, bs = [], []
    for (a, b, a0, b0, _), scale in zip(updates, scales, strict=True):
        if b0 is not None:
            b = torch.cat([b, -b0], dim=1)
        stacked += [factor for factor in (a, a0) if factor is not None]
        bs.append((b * scale).to(dtype))
    stacked_a = stacked[0] if len(stacked) == 1 else torch.cat(stacked)
    return stacked_a.to(dtype), bs, consecutive_slices([b.shape[1] for b in bs])


def consecutive_slices(sizes: Iterable[int]) -> list[slice]:
    """Consecutive slices of the given sizes, starting at 0."""
    bounds = list(accumulate(sizes, initial=0))
    return [slice(start, end) for start, end in pairwise(bounds)]


class Factors(NamedTuple):
    """A and B of layers with the same input, in the dtype of the matmuls."""

    a: Tensor  # (R, in): the A of all layers, stacked
    b: list[Tensor]  # (out, rank) by layer, without the scale
    columns: list[slice]  # of x A^T (N, R) by layer


def cast_factors(updates: Sequence[Sequence[Any]], dtype: torch.dtype) -> Factors:
    """Stack and cast the factors of all layers with one operator, which is a single kernel on a GPU."""
    stacked = [a for first, _, start, *_ in updates for a in (first, start) if a is not None]
    b = [b if start is None else torch.cat([b, -start], dim=1) for _, b, _, start, _ in updates]
    columns = consecutive_slices(factor.shape[1] for factor in b)
    if all(factor.dtype == dtype for factor in (*stacked, *b)):
        return Factors(stacked[0] if len(stacked) == 1 else torch.cat(stacked), b, columns)
    a = stacked[0].new_empty(columns[-1].stop, stacked[0].shape[1], dtype=dtype)
    cast_b = [torch.empty_like(factor, dtype=dtype) for factor in b]
    targets = [*a.split([len(factor) for factor in stacked]), *cast_b]
    torch._foreach_copy_(targets, [*stacked, *b])  # pyright: ignore[reportPrivateImportUsage]
    return Factors(a, cast_b, columns)


class FactorCache:
    """Factors of the layers of a model, cast by a few kernels at the start of each pass.

    With one row per answer, a kernel for each input of a layer takes longer than the layer's matmuls with these
    factors. The first pass that uses a layer adds it. Only for passes without gradients, with parameters that are
    changed in place.
    """

    def __init__(self) -> None:
        self.factors: dict[tuple[object, ...], Factors] = {}  # by dtype and ids of the parameters
        # Parameters and their casts, by both dtypes and the device, which one kernel has in common
        self.copies: dict[tuple[object, ...], tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))

    @contextmanager
    def use(self) -> Iterator[None]:
        """Cast the parameters of all known layers, and use the casts inside this context."""
        for sources, targets in self.copies.values():
            torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
        token = FACTOR_CACHE.set(self)
        try:
            yield
        finally:
            FACTOR_CACHE.reset(token)

    def get(self, updates: Sequence[Sequence[Any]], dtype: torch.dtype) -> Factors:
        """The result of `cast_factors`."""
        key = dtype, *(id(tensor) for update in updates for tensor in update[:4])
        if key not in self.factors:
            factors = cast_factors(updates, dtype)
            if any(start is not None for _, _, start, *_ in updates):  # columns of B are not parameters
                return factors
            self.factors[key] = factors
            a = [a for a, *_ in updates]
            self.add(zip(a, factors.a.split([len(x) for x in a]), strict=True) if factors.a is not a[0] else ())
            self.add((b, cast) for (_, b, *_), cast in zip(updates, factors.b, strict=True) if cast is not b)
        return self.factors[key]

    def add(self, copies: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Repeat copies from parameters at the start of each pass."""
        for source, target in copies:
            sources, targets = self.copies[source.dtype, target.dtype, source.device]
            sources.append(source)
            targets.append(target)


FACTOR_CACHE: ContextVar[FactorCache | None] = ContextVar("factors of the pass", default=None)


def add_updates(  # noqa: PLR0913
    bases: Sequence[BaseLinear],
    scales: Sequence[float],
    rows: Tensor,
    low: Tensor,
    factors: Factors,
    shape: torch.Size,
) -> tuple[Tensor, ...]:
    """Outputs (*shape, out) of layers for `rows` (N, in), with updates from `low` (N, R), the product with all A."""
    outputs = []
    for base, scale, b, columns in zip(bases, scales, *factors[1:], strict=True):
        y = base.matmul(rows).addmm_(low[:, columns], b.T, alpha=scale)
        # Views that an autograd function returns cannot be modified in place.
        outputs.append(torch.ops.aten._unsafe_view(y, [*shape, len(b)]))
    return tuple(outputs)


class LoRALinearFunction(torch.autograd.Function):
    """Autograd function of `lora_linear`. `tensors` are the five `LoRAWeights.tensors` of each layer.

    The scale is an argument of matmuls, so that it needs no kernel.
    """

    @staticmethod
    def forward(  # noqa: PLR0913 (autograd functions take tensors as separate arguments)
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
        outputs = add_updates(bases, scales, rows, dropped @ factors.a.T, factors, x.shape[:-1])
        ctx.bases, ctx.scales, ctx.make = bases, scales, origin.make
        ctx.save_for_backward(mask, *(t for update in updates for t in (*update[:4], None)), *origin.inputs)
        return outputs

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
        gradients: list[Tensor | None] = []
        sum_dtype = torch.promote_types(x.dtype, torch.float32)
        for i, (grad, b, columns) in enumerate(zip(rows, *factors[1:], strict=True)):
            low_grad[:, columns].addmm_(grad, b, beta=0, alpha=ctx.scales[i])
            b_param = updates[i][1]
            grad_b = transposed_product(grad, low[:, columns][:, : b_param.shape[1]], b_param.dtype)
            bias = grad.sum(0, dtype=sum_dtype) if ctx.needs_input_grad[5 + 5 * i + 4] else None
            gradients += [None, grad_b, None, None, bias]
        grad_a = transposed_product(low_grad, dropped, updates[0][0].dtype)
        for i, (columns, (a_param, *_)) in enumerate(zip(factors.columns, updates, strict=True)):
            gradients[5 * i] = grad_a[columns][: len(a_param)].to(a_param.dtype)
        grad_input = input_gradient(ctx.bases, rows, low_grad, factors.a, noise) if ctx.needs_input_grad[4] else None
        return None, None, None, None, None if grad_input is None else grad_input.view_as(x), *gradients


def scaled_low(x: Tensor, factors: Factors, scales: Sequence[float]) -> Tensor:
    """s x A^T (N, R), with the scale of each layer applied to its columns."""
    first, *other_scales = scales
    low = x.new_empty(len(x), len(factors.a)).addmm_(x, factors.a.T, beta=0, alpha=first)
    for scale, columns in zip(other_scales, factors.columns[1:], strict=True):
        if scale != first:
            low[:, columns].mul_(scale / first)
    return low


def transposed_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left^T right (p, q) for (N, p) and (N, q), contiguous, in `dtype`."""
    if dtype == torch.float32 != left.dtype and left.device.type == "cuda" and CASTS_PRODUCTS and len(left):
        return torch.mm(left.T, right, out_dtype=dtype)
    if left.shape[1] < right.shape[1] or left.device.type == "cuda":
        return (left.T @ right).to(dtype)
    # On a CPU, the other order takes 1.5 times as long if `left` is wider.
    return (right.T @ left).T.to(dtype).contiguous()


def input_gradient(
    bases: Sequence[BaseLinear], rows: Sequence[Tensor], low_grad: Tensor, a: Tensor, noise: Tensor | None
) -> Tensor:
    """Gradient of `x`, accumulated over all layers in the same memory."""
    grad_input = None
    for base, grad in zip(bases, rows, strict=True):
        grad_input = base.matmul_backward(grad, grad_input)
    assert grad_input is not None
    return grad_input.addmm_(low_grad, a) if noise is None else grad_input.addcmul_(low_grad @ a, noise)


def group_by_layer(tensors: Sequence[Any]) -> list[Sequence[Any]]:
    """Split a flat list into five tensors per layer."""
    return [tensors[i : i + 5] for i in range(0, len(tensors), 5)]


@disable_compile  # dequantizing chunks cannot be traced, and no gradient is needed
@torch.no_grad()
def lora_row_norms(update: LoRAWeights) -> Tensor:
    """Row norms (out,) of W + s B A in fp32, computed for chunks of rows."""
    a, (b,), _ = stack_factors([update.tensors], [update.scale], torch.float32)
    rows = max(1, (CPU_CHUNK_SIZE if a.device.type == "cpu" else GPU_CHUNK_SIZE) // a.shape[1])
    chunks = zip(update.base.iter_fp32_rows(rows), b.split(rows), strict=True)
    return torch.cat([torch.addmm(rows_of_w, b_rows, a).norm(dim=1) for rows_of_w, b_rows in chunks])
