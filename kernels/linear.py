"""Linear layers whose weight has another dtype than the input: fp32 master weights with bf16 matmuls."""

from typing import Any

import torch
from torch import Tensor

from tunekit.kernels import gemv


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b of `x` (..., in) and `weight` (out, in), in the dtype of `x`."""
    if weight.dtype == x.dtype or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return reference(x, weight, bias)
    return CastLinear.apply(x, weight, bias)


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return gemv.gemv(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


class CastLinear(torch.autograd.Function):
    """Casts the weight again in the backward pass: saving the casts would be a second copy of all weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return reference(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), grad = ctx.saved_tensors, grads[0]
        rows, grad_x, grad_weight, grad_bias = grad.flatten(0, -2), None, None, None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight.to(grad.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = (rows.T @ x.flatten(0, -2)).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0, dtype=torch.promote_types(rows.dtype, torch.float32))
        return grad_x, grad_weight, grad_bias
