"""Rotary position embedding (RoPE, arXiv:2104.09864)."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tunekit.kernels.argument_checks import check_dim, check_dtype, check_tensor
from tunekit.kernels.cpp_extension import DTYPES, load_library, use_torch_fallback
from tunekit.kernels.custom_op import KernelOp
from tunekit.kernels.triton_support import triton_kernels

SOURCE = Path(__file__).with_name("rope.cpp")


class RopeTables(NamedTuple):
    """Tables (B, S, 1, pairs) in fp32, and the channel layout of the pairs."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False  # pairs are adjacent channels, not half of the channels apart
    interleaved_output: bool = True  # keep interleaved pairs interleaved
    rotate_last: bool = False  # rotate the last channels of a head, not the first ones


def apply_rope(q: Tensor, k: Tensor, tables: RopeTables) -> tuple[Tensor, Tensor]:
    """Rotate queries (B, S, H, D) and keys in fp32: (a cos - b sin, b cos + a sin) for each pair (a, b) of channels.

    Channels beyond 2 * pairs are copied.
    """
    if needs_reference(q, k):
        return reference(q, tables), reference(k, tables)
    cos, sin, interleaved, interleaved_output, rotate_last = tables
    return rope_op(q, k, cos, sin, interleaved, interleaved and interleaved_output, rotate_last, False)


def needs_reference(q: Tensor, k: Tensor) -> bool:
    return q.dtype != k.dtype or use_torch_fallback(q, compiled)


def reference(x: Tensor, tables: RopeTables) -> Tensor:
    cos, sin, interleaved, interleaved_output, rotate_last = tables
    num_unrotated = x.shape[-1] - 2 * cos.shape[-1]
    # torch 2.11 cannot multiply a symbolic size by a bool.
    num_before, num_after = (num_unrotated, 0) if rotate_last else (0, num_unrotated)
    leading, rotated, trailing = x.split([num_before, 2 * cos.shape[-1], num_after], dim=-1)
    x32 = rotated.float()
    a, b = (x32[..., ::2], x32[..., 1::2]) if interleaved else x32.chunk(2, dim=-1)
    halves = a * cos - b * sin, b * cos + a * sin
    y = torch.stack(halves, dim=-1).flatten(-2) if interleaved and interleaved_output else torch.cat(halves, dim=-1)
    return torch.cat([leading, y.type_as(x), trailing], dim=-1) if num_unrotated else y.type_as(x)


class RopeSizes(ctypes.Structure):
    """Sizes and options of a call; mirrors the struct in rope.cpp."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in ("num_tokens", "num_heads", "head_dim", "num_pairs", "start", "token_stride", "head_stride")
        ),
        ("sign", ctypes.c_float),
        ("is_input_interleaved", ctypes.c_bool),
        ("is_output_interleaved", ctypes.c_bool),
        ("num_threads", ctypes.c_int),
    )


@cache
def compiled() -> ctypes.CDLL | None:
    lib = load_library(SOURCE)
    if lib is not None:
        for dtype in DTYPES.values():
            getattr(lib, f"rotate_{dtype}").argtypes = [*[ctypes.c_void_p] * 4, ctypes.POINTER(RopeSizes)]
    return lib


def rotate_forward(  # noqa: PLR0913 (an operator takes no named tuples)
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    is_input_interleaved: bool,
    is_output_interleaved: bool,
    rotate_last: bool,
    inverse: bool,
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys, by the negative angles if `inverse`."""
    check_inputs(q, k, cos, sin)
    sign = -1.0 if inverse else 1.0
    tables = [t.expand(*q.shape[:2], 1, -1).reshape(-1, t.shape[-1]).contiguous() for t in (cos, sin)]
    outputs = q.new_empty(q.shape), k.new_empty(k.shape)
    for x, y in zip((q, k), outputs, strict=True):
        heads = x.reshape(-1, *x.shape[2:]) if x.numel() else x.new_empty(0, *x.shape[2:])
        heads = heads if heads.stride(2) == 1 else heads.contiguous()
        num_pairs = tables[0].shape[1]
        start = x.shape[-1] - 2 * num_pairs if rotate_last else 0
        if x.device.type == "cuda":
            triton_kernels("rope").rotate(heads, y, *tables, start, sign, is_input_interleaved, is_output_interleaved)
            continue
        sizes = RopeSizes(*heads.shape, num_pairs, start, *heads.stride()[:2], sign)
        sizes.is_input_interleaved, sizes.is_output_interleaved = is_input_interleaved, is_output_interleaved
        sizes.num_threads = torch.get_num_threads()
        pointers = (t.data_ptr() for t in (heads, y, *tables))
        getattr(compiled(), f"rotate_{DTYPES[x.dtype]}")(*pointers, sizes)
    return outputs


def check_inputs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raise ValueError unless the tables fit queries and keys: a table of more pairs would write beyond the heads."""
    shape, key_shape = q.shape, k.shape
    check_dim("rope", "q", q, 4)
    check_dim("rope", "k", k, 4)
    check_tensor("rope", "k", k, (shape[0], shape[1], key_shape[2], key_shape[3]), q.dtype, q.device)
    check_dtype("rope", "cos", cos, torch.float32)
    check_tensor("rope", "sin", sin, cos.shape, torch.float32, q.device)
    width = min(shape[3], key_shape[3])
    if 2 * cos.shape[-1] > width:
        raise ValueError(f"rope: cos has shape {tuple(cos.shape)}, expected at most {width // 2} pairs of channels")


rope_op = KernelOp("rope", rotate_forward)


@rope_op.register_fake
def _(q: Tensor, k: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, *tables, ctx.is_input_interleaved, ctx.is_output_interleaved, ctx.rotate_last, ctx.inverse = inputs
    ctx.save_for_backward(*tables)


def rotate_backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor | None, ...]:
    layouts = ctx.is_output_interleaved, ctx.is_input_interleaved
    gradients = rope_op(grad_q, grad_k, *ctx.saved_tensors, *layouts, ctx.rotate_last, not ctx.inverse)
    return *gradients, None, None, None, None, None, None


rope_op.register_autograd(rotate_backward, setup_context)
