"""FlashAttention in C++ for CPUs (arXiv:2205.14135, arXiv:2307.08691), by tiles that fit into the cache.

The forward pass saves the log-sum-exp of each query, from which the backward pass recomputes the probabilities.
Results do not depend on the number of threads.
"""

import ctypes
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tunekit.kernels import fake_mode
from tunekit.kernels.argument_checks import check_contiguous, check_dim, check_tensor
from tunekit.kernels.cpp_extension import DTYPES, load_library
from tunekit.kernels.custom_op import KernelOp
from tunekit.kernels.sequence_layout import SequenceLayout
from tunekit.kernels.torch_compile import assume_constant_result

SOURCE = Path(__file__).with_name("attention.cpp")
TENSORS = "q", "k", "v", "y", "lse", "sinks", "grad", "dq", "dk", "dv", "delta", "offsets", "key_offsets"
SIZES = "documents", "tokens", "keys", "heads", "kv_heads", "dim", "v_dim", "window", "chunk"
STRIDES = "q_token", "q_head", "k_token", "k_head", "v_token", "v_head"
UNLIMITED = 2**40  # window or chunk size without effect


class NativeArgs(ctypes.Structure):
    """Arguments of the functions in attention.cpp; mirrors its struct of the same fields."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in TENSORS],
        *[(name, ctypes.c_int64) for name in (*SIZES, *STRIDES)],
        *[(name, ctypes.c_float) for name in ("scale", "softcap")],
        ("threads", ctypes.c_int32),
    ]


@cache
def compiled() -> ctypes.CDLL | None:
    lib = load_library(SOURCE)
    return lib if lib is not None and lib.is_supported() else None


@assume_constant_result
def is_available() -> bool:
    """Whether the C++ library can be built and the CPU supports it."""
    return fake_mode.is_fake() or compiled() is not None


def is_supported(q: Tensor) -> bool:
    return q.device.type == "cpu" and q.dtype in DTYPES and is_available()


def attention_cpu(
    q: Tensor, k: Tensor, v: Tensor, params: list[float], layout: SequenceLayout | None, sinks: Tensor | None
) -> Tensor:
    """Causal attention (B, S, H, D_v). `params`: scale, window, chunk and softcap; 0: none.

    If documents have more keys than queries, the queries belong to the last keys.
    """
    if layout is None:
        cu_seqlens = key_cu_seqlens = torch.arange(len(q) + 1) * q.shape[1]
    else:
        cu_seqlens, key_cu_seqlens = layout.cu_seqlens, layout.key_cu_seqlens
    return attention(q, k, v, cu_seqlens, key_cu_seqlens, sinks, params)[0]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    key_cu_seqlens: Tensor,
    sinks: Tensor | None,
    params: list[float],
) -> tuple[Tensor, Tensor]:
    """Causal attention (B, S, H, D_v), and base-2 log-sum-exp (H, B * S) of the scores in fp32."""
    y = q.new_empty(*q.shape[:3], v.shape[3])
    lse = torch.empty(q.shape[2], q.shape[0] * q.shape[1])
    sinks = None if sinks is None else sinks.float().contiguous()
    call_native("forward", params, (q, k, v, cu_seqlens, key_cu_seqlens), sinks=sinks, y=y, lse=lse)
    return y, lse


attention = KernelOp("attention", forward)


def compute_gradients(grad: Tensor, saved: list[Tensor], params: list[float]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and sinks, as `register_gradients` defines them."""
    q, k, v, _, _, y, lse, *sinks = saved
    check_tensor("attention", "y", y, (*q.shape[:3], v.shape[-1]), q.dtype, q.device)
    check_tensor("attention", "grad", grad, y.shape, y.dtype, y.device)
    check_tensor("attention", "lse", lse, (q.shape[2], q.shape[0] * q.shape[1]), torch.float32, q.device)
    check_contiguous("attention", "y", y)
    check_contiguous("attention", "lse", lse)
    # Keys that no query attends to need zero gradients; they exist only if there are more keys than queries.
    allocate = torch.empty_like if k.shape[:2] == q.shape[:2] else torch.zeros_like
    dq, dk, dv = (allocate(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    delta = torch.empty_like(lse)
    gradients = {"grad": grad.contiguous(), "dq": dq, "dk": dk, "dv": dv}
    call_native("backward", params, saved[:5], y=y, lse=lse, delta=delta, **gradients)
    if not sinks:
        return dq, dk, dv, q.new_empty(0)
    # The probability of a sink is 1 minus that of all keys, and its value is zero.
    sink_grad = -((sinks[0].float()[:, None] * math.log2(math.e) - lse).exp2() * delta).sum(1)
    return dq, dk, dv, sink_grad.type_as(sinks[0])


attention_backward = KernelOp("attention_backward", compute_gradients)


def flatten_tokens(x: Tensor) -> Tensor:
    """Flatten (B, S, H, D) to (T, H, D) with contiguous heads."""
    x = x.flatten(0, 1)
    return x if x.stride(-1) == 1 else x.contiguous()


def check_heads(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
    """Raise ValueError unless the heads of flattened queries, keys and values fit each other."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_dim("attention", name, x, 3)
    check_tensor("attention", "k", k, (*k.shape[:2], q.shape[2]), q.dtype, q.device)
    check_tensor("attention", "v", v, (*k.shape[:2], v.shape[2]), q.dtype, q.device)
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"attention: k has {k.shape[1]} heads, expected a divisor of the {q.shape[1]} heads of q")
    if sinks is not None:
        check_tensor("attention", "sinks", sinks, q.shape[1:2], torch.float32, q.device)


def call_native(name: str, params: list[float], inputs: Sequence[Tensor], **others: Tensor | None) -> None:
    """Call a function of attention.cpp. `inputs` are queries, keys, values, and the bounds of their documents."""
    q, k, v = (flatten_tokens(x) for x in inputs[:3])
    offsets, key_offsets = (x.long().contiguous() for x in inputs[3:])
    check_heads(q, k, v, others.get("sinks"))
    for key, x in (("cu_seqlens", offsets), ("key_cu_seqlens", key_offsets)):
        check_tensor("attention", key, x, (max(1, len(offsets)),), torch.int64, q.device)
    scale, window, chunk, softcap = params
    if window < 0 or chunk < 0:
        raise ValueError(f"attention: window is {window} and chunk is {chunk}, expected 0 or more")
    limits = [int(x) or UNLIMITED for x in (window, chunk)]
    sizes = [len(offsets) - 1, len(q), len(k), q.shape[1], k.shape[1], q.shape[2], v.shape[2], *limits]
    sizes += [step for x in (q, k, v) for step in x.stride()[:2]]
    tensors = {"q": q, "k": k, "v": v, "offsets": offsets, "key_offsets": key_offsets, **others}
    pointers = {key: None if tensor is None else tensor.data_ptr() for key, tensor in tensors.items()}
    named_sizes = dict(zip((*SIZES, *STRIDES), sizes, strict=True))
    call = NativeArgs(**pointers, **named_sizes, scale=scale, softcap=softcap, threads=torch.get_num_threads())
    if not getattr(compiled(), f"{name}_{DTYPES[q.dtype]}")(ctypes.byref(call)):
        raise ValueError(
            f"attention: documents of cu_seqlens and key_cu_seqlens do not fill {len(q)} queries and {len(k)} keys, or "
            "have more queries than keys"
        )


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    rows, length, heads, _ = q.shape
    return q.new_empty(rows, length, heads, v.shape[3]), q.new_empty(heads, rows * length, dtype=torch.float32)


def register_gradients(op: KernelOp, backward_op: KernelOp) -> None:
    """Set the gradients of op(q, k, v, cu_seqlens, key_cu_seqlens, sinks, *options), which returns y and log-sum-exp.

    backward_op(grad, saved, *options) returns those of q, k, v and sinks; `saved` are q, k, v, both bounds, y,
    log-sum-exp, and the sinks, if any.
    """

    @backward_op.register_fake
    def _(grad: Tensor, saved: list[Tensor], *options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v, _, _, _, _, *sinks = saved
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        return dq, dk, dv, sinks[0].new_empty(sinks[0].shape) if sinks else q.new_empty(0)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, sinks = inputs[:6]
        ctx.has_sinks, ctx.options = sinks is not None, inputs[6:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output, *([] if sinks is None else [sinks]))

    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        dq, dk, dv, sink_grad = backward_op(grad, list(ctx.saved_tensors), *ctx.options)
        return dq, dk, dv, None, None, sink_grad if ctx.has_sinks else None, *(None for _ in ctx.options)

    op.register_autograd(backward, setup_context)


register_gradients(attention, attention_backward)
