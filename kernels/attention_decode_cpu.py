"""Attention of one new token per row on a KV cache, in C++ for CPUs: one call for rows of different lengths."""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from tunekit.kernels.argument_checks import check_index_range, check_tensor
from tunekit.kernels.attention_cpu import DTYPES
from tunekit.kernels.cpp_extension import load_library

SOURCE = Path(__file__).with_name("attention_decode.cpp")
SIZES = "rows", "heads", "kv_heads", "dim", "v_dim"
STRIDES = "q_row", "q_head", "k_row", "k_slot", "k_head", "v_row", "v_slot", "v_head"


class NativeCall(ctypes.Structure):
    """Arguments of the functions in attention_decode.cpp; mirrors its struct of the same fields."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("q", "k", "v", "sinks", "y", "spans")],
        *[(name, ctypes.c_int64) for name in (*SIZES, *STRIDES)],
        *[(name, ctypes.c_float) for name in ("scale", "softcap")],
        ("threads", ctypes.c_int32),
    ]


@cache
def compiled() -> ctypes.CDLL | None:
    lib = load_library(SOURCE)
    return lib if lib is not None and lib.able() else None


def is_supported(q: Tensor, k: Tensor, v: Tensor) -> bool:
    has_unit_strides = q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    return q.dtype in DTYPES and q.dtype == k.dtype == v.dtype and has_unit_strides and compiled() is not None


def decode_cpu(
    q: Tensor, k: Tensor, v: Tensor, spans: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention (B, H, V) of queries (B, H, D) on caches (B, slots, H_kv, D) and (B, slots, H_kv, V).

    Has no gradients. `spans` (B, 2) int64 has the first visible slot of each row, and the slot after the last.
    """
    rows, heads, dim = q.shape
    slots, kv_heads, v_dim = v.shape[1:]
    check_tensor("decode_cpu", "k", k, (rows, slots, kv_heads, dim), q.dtype, q.device)
    check_tensor("decode_cpu", "v", v, (rows, slots, kv_heads, v_dim), q.dtype, q.device)
    check_tensor("decode_cpu", "spans", spans, (rows, 2), torch.int64, q.device)
    if heads % kv_heads:
        raise ValueError(f"decode_cpu: {heads} heads are not a multiple of {kv_heads} key heads")
    sinks = None if sinks is None else sinks.float().contiguous()
    if sinks is not None:
        check_tensor("decode_cpu", "sinks", sinks, (heads,), torch.float32, q.device)
    y = q.new_empty(rows, heads, v_dim)
    tensors = q, k, v, sinks, y, spans
    pointers = [None if x is None else x.data_ptr() for x in tensors]
    strides = *q.stride()[:2], *k.stride()[:3], *v.stride()[:3]
    sizes = rows, heads, kv_heads, dim, v_dim
    call = NativeCall(*pointers, *sizes, *strides, scale, softcap or 0.0, torch.get_num_threads())
    getattr(compiled(), f"decode_{DTYPES[q.dtype]}")(ctypes.byref(call))
    return y


def check_spans(spans: Tensor, slots: int) -> None:
    """Raise IndexError unless all spans are in [0, slots], and ValueError if one is empty. Reads the values once."""
    check_index_range("decode_cpu", "spans", spans, slots + 1)
    if not bool((spans[:, 0] < spans[:, 1]).all()):
        raise ValueError("decode_cpu: a row has no visible slot")
