"""Attention on a CPU that multiplies bf16: C++ that works through tiles in the cache (arXiv:2205.14135, 2307.08691).

The forward pass keeps the log-sum-exp of each query; the backward pass makes the shares anew. Bits do not depend on
the number of threads.
"""

import ctypes
import math
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tunekit.kernels import fake_mode
from tunekit.kernels.cpp_extension import load_library
from tunekit.kernels.torch_compile import assume_constant_result

SOURCE = Path(__file__).with_name("attention.cpp")
DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
TENSORS = "q", "k", "v", "y", "lse", "sinks", "grad", "dq", "dk", "dv", "delta", "offsets", "key_offsets"
SIZES = "documents", "tokens", "heads", "kv_heads", "dim", "v_dim", "window", "chunk"
STRIDES = "q_token", "q_head", "k_token", "k_head", "v_token", "v_head"
UNLIMITED = 2**40  # a window or a chunk that nothing leaves


class NativeCall(ctypes.Structure):
    """What attention.cpp calls so."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in TENSORS],
        *[(name, ctypes.c_int64) for name in (*SIZES, *STRIDES)],
        *[(name, ctypes.c_float) for name in ("scale", "softcap")],
        ("threads", ctypes.c_int32),
    ]


@cache
def compiled() -> ctypes.CDLL | None:
    lib = load_library(SOURCE)
    return lib if lib is not None and lib.able() else None


@assume_constant_result
def is_available() -> bool:
    """Whether there is a compiler, and a processor that it can be used for."""
    return fake_mode.is_fake() or compiled() is not None


def is_supported(q: Tensor) -> bool:
    return q.device.type == "cpu" and q.dtype in DTYPES and is_available()


def attention_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    params: list[float],
    offsets: Tensor | None,
    sinks: Tensor | None,
    key_offsets: Tensor | None = None,
) -> Tensor:
    """Causal attention (B, S, H, D_v). `rule`: scale, window, chunk and softcap; 0 says that there is none.

    `key_offsets` bound the keys of documents that have more of them than queries, which are those of the last keys.
    """
    rows, length = q.shape[:2]
    if offsets is None:
        offsets = torch.arange(rows + 1) * length
    # An operator loads the compiler when it is first called, which is long for who only asks for an answer.
    operator = torch.is_grad_enabled() or torch.compiler.is_compiling() or fake_mode.is_fake()
    work = attention if operator else forward
    return work(q, k, v, offsets, sinks, params, key_offsets)[0]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    sinks: Tensor | None,
    params: list[float],
    key_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention (B, S, H, D_v), and the log-sum-exp (H, B * S) of the scores in fp32, to the base 2."""
    y = q.new_empty(*q.shape[:3], v.shape[3])
    lse = torch.empty(q.shape[2], q.shape[0] * q.shape[1])
    sinks = None if sinks is None else sinks.float().contiguous()
    bounds = to_int64_bounds(offsets, offsets if key_offsets is None else key_offsets)
    call_native(
        "forward",
        params,
        q=flatten_tokens(q),
        k=flatten_tokens(k),
        v=flatten_tokens(v),
        **bounds,
        sinks=sinks,
        y=y,
        lse=lse,
    )
    return y, lse


attention = torch.library.custom_op("tunekit::attention", forward, mutates_args=())


@torch.library.custom_op("tunekit::attention_back", mutates_args=())
def attention_back(grad: Tensor, saved: list[Tensor], params: list[float]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys, values and sinks; `saved` is what `keep` keeps."""
    q, k, v, offsets, key_offsets, y, lse, *sinks = saved
    # Keys that no query sees have a gradient too, and there are such only beside others without a query.
    made = torch.empty_like if k.shape[:2] == q.shape[:2] else torch.zeros_like
    dq, dk, dv = (made(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    delta = torch.empty_like(lse)
    given = {
        "q": flatten_tokens(q),
        "k": flatten_tokens(k),
        "v": flatten_tokens(v),
        "y": y,
        "lse": lse,
        **to_int64_bounds(offsets, key_offsets),
    }
    call_native("backward", params, **given, grad=grad.contiguous(), dq=dq, dk=dk, dv=dv, delta=delta)
    if not sinks:
        return dq, dk, dv, q.new_empty(0)
    # The share of a sink is what the others lack to 1, and its value is nothing.
    to_sinks = -((sinks[0].float()[:, None] * math.log2(math.e) - lse).exp2() * delta).sum(1)
    return dq, dk, dv, to_sinks.type_as(sinks[0])


def to_int64_bounds(offsets: Tensor, key_offsets: Tensor) -> dict[str, Tensor]:
    return {"offsets": offsets.long(), "key_offsets": key_offsets.long()}


def flatten_tokens(x: Tensor) -> Tensor:
    """(B, S, H, D) to (T, H, D), the numbers of a head without gaps."""
    x = x.flatten(0, 1)
    return x if x.stride(-1) == 1 else x.contiguous()


def call_native(name: str, params: list[float], **tensors: Tensor | None) -> None:
    """Call a function of attention.cpp on flat tensors."""
    lib, call = compiled(), NativeCall()
    q, k, v, *bounds = (tensors[name] for name in ("q", "k", "v", "offsets", "key_offsets"))
    offsets, keys = bounds
    assert lib is not None and q is not None and k is not None and v is not None
    assert offsets is not None and keys is not None and len(offsets) == len(keys)
    assert offsets[0] == keys[0] == 0, "documents do not fill the rows"
    assert offsets[-1] == len(q) and keys[-1] == len(k) == len(v), "documents do not fill the rows"
    assert q.dtype == k.dtype == v.dtype
    scale, window, chunk, softcap = params
    limits = [int(x) or UNLIMITED for x in (window, chunk)]
    sizes = [len(offsets) - 1, *q.shape[:2], k.shape[1], q.shape[2], v.shape[2], *limits]
    sizes += [step for x in (q, k, v) for step in x.stride()[:2]]
    places = {key: None if tensor is None else tensor.data_ptr() for key, tensor in tensors.items()}
    for key, value in (places | dict(zip((*SIZES, *STRIDES), sizes, strict=True))).items():
        setattr(call, key, value)
    call.scale, call.softcap, call.threads = scale, softcap, torch.get_num_threads()
    getattr(lib, f"{name}_{DTYPES[q.dtype]}")(ctypes.byref(call))


@attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    sinks: Tensor | None,
    rule: list[float],
    key_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    rows, length, heads, _ = q.shape
    return q.new_empty(rows, length, heads, v.shape[3]), q.new_empty(heads, rows * length, dtype=torch.float32)


@attention_back.register_fake
def _(grad: Tensor, saved: list[Tensor], params: list[float]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, _, _, _, _, *sinks = saved
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv, torch.empty_like(sinks[0]) if sinks else q.new_empty(0)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, offsets, sinks, ctx.rule, key_offsets = inputs
    bounds = offsets, offsets if key_offsets is None else key_offsets
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *bounds, *output, *([] if sinks is None else [sinks]))
    ctx.sunk = sinks is not None


def attention_backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    dq, dk, dv, to_sinks = attention_back(grad, list(ctx.saved_tensors), ctx.rule)
    return dq, dk, dv, None, to_sinks if ctx.sunk else None, None, None


attention.register_autograd(attention_backward, setup_context=setup_context)
