"""RMSNorm."""

import ctypes
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.kernels.argument_checks import check_contiguous, check_tensor
from tunekit.kernels.cpp_extension import DTYPES, contiguous_rows, has_kernel, load_library, use_torch_fallback
from tunekit.kernels.custom_op import KernelOp
from tunekit.kernels.recompute import mark_recomputable
from tunekit.kernels.triton_support import triton_kernels

SOURCE = Path(__file__).with_name("norm.cpp")
ROWS_PER_SUM = 64  # rows whose weight gradients are summed together, as in norm.cpp


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, scale_in_fp32: bool = False) -> Tensor:
    """x / rms(x) * (weight + offset) over the last axis, in fp32, returned in the dtype of `x`.

    The result is cast before it is multiplied by the weight, as in Llama, or after it (`scale_in_fp32`), as in Gemma
    and OLMo. This makes bf16 results equal to those of their reference implementations.
    """
    recompute = partial(rms_norm, eps=eps, offset=offset, scale_in_fp32=scale_in_fp32)
    if use_torch_fallback(x, compiled):
        return mark_recomputable(reference(x, weight, eps, offset, scale_in_fp32), recompute, x, weight)
    if weight is not None and not has_kernel(weight.dtype, x.device):
        weight = weight.float()
    return mark_recomputable(rms_norm_op(x, weight, eps, offset, scale_in_fp32 or offset != 0)[0], recompute, x, weight)


def reference(x: Tensor, weight: Tensor | None, eps: float, offset: float, scale_in_fp32: bool) -> Tensor:
    y = F.rms_norm(x.float(), x.shape[-1:], eps=eps)
    if weight is None:
        return y.type_as(x)
    if scale_in_fp32 or offset:
        return (y * (weight.float() + offset)).type_as(x)
    return y.type_as(x) * weight.type_as(x)


class NormSizes(ctypes.Structure):
    """Sizes and options of a call; mirrors the struct in norm.cpp."""

    _fields_ = (
        ("num_rows", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("grad_stride", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("offset", ctypes.c_float),
        ("is_scaled_in_fp32", ctypes.c_bool),
        ("num_threads", ctypes.c_int),
    )


@cache
def compiled() -> ctypes.CDLL | None:
    lib = load_library(SOURCE)
    if lib is not None:
        pointer = ctypes.c_void_p
        for name in (f"{a}_{b}" for a in DTYPES.values() for b in DTYPES.values()):
            getattr(lib, f"forward_{name}").argtypes = [*[pointer] * 4, ctypes.POINTER(NormSizes)]
            getattr(lib, f"backward_{name}").argtypes = [*[pointer] * 6, ctypes.POINTER(NormSizes)]
    return lib


def native_function(kind: str, x: Tensor, weight: Tensor | None) -> Any:
    """Compiled function for the dtypes of these tensors."""
    return getattr(compiled(), f"{kind}_{DTYPES[x.dtype]}_{DTYPES[x.dtype if weight is None else weight.dtype]}")


def forward(x: Tensor, weight: Tensor | None, eps: float, offset: float, scale_in_fp32: bool) -> tuple[Tensor, Tensor]:
    """Norm of x (..., dim), and 1 / rms of each row (...) in fp32 for the backward pass."""
    rows, y, rstd = contiguous_rows(x), x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)
    weight = contiguous_weight(weight, x)
    if x.device.type == "cuda":
        triton_kernels("rms_norm").forward(rows, weight, y, rstd, eps, offset, scale_in_fp32)
    else:
        sizes = NormSizes(*rows.shape, rows.stride(0), 0, eps, offset, scale_in_fp32, torch.get_num_threads())
        kernel = native_function("forward", x, weight)
        kernel(rows.data_ptr(), 0 if weight is None else weight.data_ptr(), y.data_ptr(), rstd.data_ptr(), sizes)
    return y, rstd


def contiguous_weight(weight: Tensor | None, x: Tensor) -> Tensor | None:
    """Contiguous weight (dim,) for x (..., dim). Raises ValueError if it has another shape or device."""
    if weight is None:
        return None
    check_tensor("rms_norm", "weight", weight, x.shape[-1:], weight.dtype, x.device)
    return weight.contiguous()


rms_norm_op = KernelOp("rms_norm", forward)


def compute_gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    scale_in_fp32: bool,
    needs_weight_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of `x` and, if `needs_weight_grad`, of the weight (dim,) in fp32."""
    check_tensor("rms_norm", "grad", grad, x.shape, x.dtype, x.device)
    check_tensor("rms_norm", "rstd", rstd, x.shape[:-1], torch.float32, x.device)
    check_contiguous("rms_norm", "rstd", rstd)
    rows, grads, grad_x = contiguous_rows(x), contiguous_rows(grad), x.new_empty(x.shape)
    count = -(-len(rows) // ROWS_PER_SUM) if needs_weight_grad else 0
    partial_sums = x.new_empty(count, x.shape[-1], dtype=torch.float32)
    weight = contiguous_weight(weight, x)
    if x.device.type == "cuda":
        triton_kernels("rms_norm").backward(grads, rows, weight, rstd, grad_x, partial_sums, offset, scale_in_fp32)
    else:
        strides = rows.stride(0), grads.stride(0)
        sizes = NormSizes(*rows.shape, *strides, 0, offset, scale_in_fp32, torch.get_num_threads())
        inputs = grads, rows, weight, rstd, grad_x, partial_sums if needs_weight_grad else None
        kernel = native_function("backward", x, weight)
        kernel(*(0 if t is None else t.data_ptr() for t in inputs), sizes)
    return grad_x, partial_sums.sum(0)


rms_norm_backward_op = KernelOp("rms_norm_backward", compute_gradients)


@rms_norm_op.register_fake
def _(x: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


@rms_norm_backward_op.register_fake
def _(grad: Tensor, x: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[-1], dtype=torch.float32)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, ctx.offset, ctx.scale_in_fp32 = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, output[1])


def rms_norm_backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None, None
    x, weight, rstd = ctx.saved_tensors
    needs_weight_grad = ctx.needs_input_grad[1]
    grad_x, grad_weight = rms_norm_backward_op(grad, x, weight, rstd, ctx.offset, ctx.scale_in_fp32, needs_weight_grad)
    return grad_x, grad_weight.to(weight.dtype) if needs_weight_grad else None, None, None, None


rms_norm_op.register_autograd(rms_norm_backward, setup_context)
