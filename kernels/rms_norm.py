"""Root mean square norm."""

import ctypes
import importlib
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.kernels import fake_mode
from tunekit.kernels.cpp_extension import contiguous_rows, load_library, use_torch_fallback
from tunekit.kernels.recompute import mark_recomputable

SOURCE = Path(__file__).with_name("norm.cpp")
ROWS_PER_SUM = 64  # whose gradients to the weight are added up together; norm.cpp knows it too
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}  # of rows and of weights, in any pair


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, late: bool = False) -> Tensor:
    """x / rms(x) * (weight + offset) over the last axis, in fp32, returned in the dtype of `x`.

    The weight multiplies after the cast, as Llama's reference does, or in fp32 before it (`late`), as those of Gemma
    and OLMo do, so that bf16 results equal theirs too.
    """
    again = partial(rms_norm, eps=eps, offset=offset, late=late)
    if needs_reference(x):
        return mark_recomputable(reference(x, weight, eps, offset, late), again, x, weight)
    if weight is not None and weight.dtype not in DTYPES:
        weight = weight.float()
    # A token's norm takes less time than a way to its gradient.
    work = rms_norm_op if torch.is_grad_enabled() or fake_mode.is_fake() else forward
    return mark_recomputable(work(x, weight, eps, offset, late or offset != 0)[0], again, x, weight)


def needs_reference(x: Tensor) -> bool:
    return x.dtype not in DTYPES or use_torch_fallback(x, compiled)


def reference(x: Tensor, weight: Tensor | None, eps: float, offset: float, late: bool) -> Tensor:
    y = F.rms_norm(x.float(), x.shape[-1:], eps=eps)
    if weight is None:
        return y.type_as(x)
    if late or offset:
        return (y * (weight.float() + offset)).type_as(x)
    return y.type_as(x) * weight.type_as(x)


class NormSizes(ctypes.Structure):
    """What norm.cpp asks about the numbers at its pointers."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("grad_stride", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("offset", ctypes.c_float),
        ("late", ctypes.c_bool),
        ("threads", ctypes.c_int),
    )


@cache
def compiled() -> ctypes.CDLL | None:
    lib = load_library(SOURCE)
    if lib is not None:
        place = ctypes.c_void_p
        for name in (f"{a}_{b}" for a in DTYPES.values() for b in DTYPES.values()):
            getattr(lib, f"forward_{name}").argtypes = [*[place] * 4, ctypes.POINTER(NormSizes)]
            getattr(lib, f"backward_{name}").argtypes = [*[place] * 6, ctypes.POINTER(NormSizes)]
    return lib


@cache
def native_function(kind: str, x: torch.dtype, weight: torch.dtype) -> Any:
    """The compiled function for these dtypes."""
    return getattr(compiled(), f"{kind}_{DTYPES[x]}_{DTYPES[weight]}")


@cache
def gpu() -> Any:
    return importlib.import_module("tunekit.kernels.rms_norm_triton")


def forward(x: Tensor, weight: Tensor | None, eps: float, offset: float, late: bool) -> tuple[Tensor, Tensor]:
    """The norm of (..., dim), and 1 / rms of every row in fp32 (...), from which the backward pass makes the rest."""
    rows, y, rstd = contiguous_rows(x), x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)
    weight = None if weight is None else weight.contiguous()
    if x.device.type == "cuda":
        gpu().forward(rows, weight, y, rstd, eps, offset, late)
    else:
        sizes = NormSizes(*rows.shape, rows.stride(0), 0, eps, offset, late, torch.get_num_threads())
        run = native_function("forward", x.dtype, x.dtype if weight is None else weight.dtype)
        run(rows.data_ptr(), 0 if weight is None else weight.data_ptr(), y.data_ptr(), rstd.data_ptr(), sizes)
    return y, rstd


rms_norm_op = torch.library.custom_op("tunekit::rms_norm", forward, mutates_args=())


@torch.library.custom_op("tunekit::rms_norm_back", mutates_args=())
def rms_norm_backward_op(
    grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, late: bool, learnt: bool
) -> tuple[Tensor, Tensor]:
    """Gradients to `x` and, if it is `learnt`, to the weight (dim,), in fp32."""
    rows, grads, to_x = contiguous_rows(x), contiguous_rows(grad), x.new_empty(x.shape)
    count = -(-len(rows) // ROWS_PER_SUM) if learnt else 0
    parts = x.new_empty(count, x.shape[-1], dtype=torch.float32)
    weight = None if weight is None else weight.contiguous()
    if x.device.type == "cuda":
        gpu().backward(grads, rows, weight, rstd, to_x, parts, offset, late)
    else:
        sizes = NormSizes(*rows.shape, rows.stride(0), grads.stride(0), 0, offset, late, torch.get_num_threads())
        ins = grads, rows, weight, rstd, to_x, parts if learnt else None
        run = native_function("backward", x.dtype, x.dtype if weight is None else weight.dtype)
        run(*(0 if t is None else t.data_ptr() for t in ins), sizes)
    return to_x, parts.sum(0)


@rms_norm_op.register_fake
def _(x: Tensor, weight: Tensor | None, eps: float, offset: float, late: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


@rms_norm_backward_op.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, late: bool, learnt: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[-1], dtype=torch.float32)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, ctx.offset, ctx.late = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, output[1])


def rms_norm_backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None, None
    x, weight, rstd = ctx.saved_tensors
    learnt = ctx.needs_input_grad[1]
    to_x, to_weight = rms_norm_backward_op(grad, x, weight, rstd, ctx.offset, ctx.late, learnt)
    return to_x, to_weight.to(weight.dtype) if learnt else None, None, None, None


rms_norm_op.register_autograd(rms_norm_backward, setup_context=setup_context)
