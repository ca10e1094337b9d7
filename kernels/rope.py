"""Rotation of queries and keys by the angles of their positions."""

import ctypes
import importlib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tunekit.kernels import fake_mode
from tunekit.kernels.cpp_extension import load_library, use_torch_fallback

SOURCE = Path(__file__).with_name("rope.cpp")
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class RopeTables(NamedTuple):
    """Tables of one pass, both (B, S, 1, pairs), fp32, and where the two channels of a pair are."""

    cos: Tensor
    sin: Tensor
    paired: bool = False  # they are neighbours, and not half of the channels apart
    keep_paired: bool = True  # and stay so
    last: bool = False  # the last channels of a head turn, and not the first


def apply_rope(q: Tensor, k: Tensor, rotation: RopeTables) -> tuple[Tensor, Tensor]:
    """Queries (B, S, H, D) and keys, turned in fp32. Channels of which the tables do not tell pass."""
    if needs_reference(q, k):
        return reference(q, rotation), reference(k, rotation)
    cos, sin, paired, keep_paired, last = rotation
    work = rotate_op if torch.is_grad_enabled() or fake_mode.is_fake() else rotate
    return work(q, k, cos, sin, paired, paired and keep_paired, last, False)


def needs_reference(q: Tensor, k: Tensor) -> bool:
    return q.dtype not in DTYPES or q.dtype != k.dtype or use_torch_fallback(q, compiled)


def reference(x: Tensor, rotation: RopeTables) -> Tensor:
    cos, sin, paired, keep_paired, last = rotation
    still = x.shape[-1] - 2 * cos.shape[-1]
    # torch 2.11 cannot multiply a symbolic size by a bool.
    ahead, after = (still, 0) if last else (0, still)
    before, turning, behind = x.split([ahead, 2 * cos.shape[-1], after], dim=-1)
    wide = turning.float()
    a, b = (wide[..., ::2], wide[..., 1::2]) if paired else wide.chunk(2, dim=-1)
    halves = a * cos - b * sin, b * cos + a * sin
    y = torch.stack(halves, dim=-1).flatten(-2) if paired and keep_paired else torch.cat(halves, dim=-1)
    return torch.cat([before, y.type_as(x), behind], dim=-1) if still else y.type_as(x)


class RopeSizes(ctypes.Structure):
    """What rope.cpp asks about the numbers at its pointers."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in ("tokens", "heads", "dim", "half", "start", "token_stride", "head_stride")
        ),
        ("sign", ctypes.c_float),
        ("paired_in", ctypes.c_bool),
        ("paired_out", ctypes.c_bool),
        ("threads", ctypes.c_int),
    )


@cache
def compiled() -> ctypes.CDLL | None:
    lib = load_library(SOURCE)
    if lib is not None:
        for dtype in DTYPES.values():
            getattr(lib, f"rotate_{dtype}").argtypes = [*[ctypes.c_void_p] * 4, ctypes.POINTER(RopeSizes)]
    return lib


@cache
def gpu() -> Any:
    return importlib.import_module("tunekit.kernels.rope_triton")


def rotate(  # noqa: PLR0913 (an operator takes no named tuples)
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, paired_in: bool, paired_out: bool, last: bool, back: bool
) -> tuple[Tensor, Tensor]:
    """Both by their angles or, on the way `back`, by the negative ones."""
    tables = [t.expand(*q.shape[:2], 1, -1).reshape(-1, t.shape[-1]).contiguous() for t in (cos, sin)]
    made = q.new_empty(q.shape), k.new_empty(k.shape)
    for x, y in zip((q, k), made, strict=True):
        heads = x.reshape(-1, *x.shape[2:]) if x.numel() else x.new_empty(0, *x.shape[2:])
        heads = heads if heads.stride(2) == 1 else heads.contiguous()
        half = tables[0].shape[1]
        start = x.shape[-1] - 2 * half if last else 0
        if x.device.type == "cuda":
            gpu().rotate(heads, y, *tables, start, -1.0 if back else 1.0, paired_in, paired_out)
            continue
        sizes = RopeSizes(*heads.shape, half, start, *heads.stride()[:2], -1.0 if back else 1.0, paired_in, paired_out)
        sizes.threads = torch.get_num_threads()
        places = (t.data_ptr() for t in (heads, y, *tables))
        getattr(compiled(), f"rotate_{DTYPES[x.dtype]}")(*places, sizes)
    return made


rotate_op = torch.library.custom_op("tunekit::rotate", rotate, mutates_args=())


@rotate_op.register_fake
def _(  # noqa: PLR0913
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, paired_in: bool, paired_out: bool, last: bool, back: bool
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, *tables, ctx.paired_in, ctx.paired_out, ctx.last, ctx.back = inputs
    ctx.save_for_backward(*tables)


def rotate_backward(ctx: Any, to_q: Tensor, to_k: Tensor) -> tuple[Tensor | None, ...]:
    turns = rotate_op(to_q, to_k, *ctx.saved_tensors, ctx.paired_out, ctx.paired_in, ctx.last, not ctx.back)
    return *turns, None, None, None, None, None, None


rotate_op.register_autograd(rotate_backward, setup_context=setup_context)
