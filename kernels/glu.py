"""Gated activations of MLPs (SwiGLU and variants)."""

import ctypes
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.kernels.argument_checks import check_tensor
from tunekit.kernels.cpp_extension import DTYPES, contiguous_rows, load_library, use_torch_fallback
from tunekit.kernels.custom_op import KernelOp
from tunekit.kernels.recompute import mark_recomputable
from tunekit.kernels.triton_support import triton_kernels

SOURCE = Path(__file__).with_name("glu.cpp")
# Below this number of elements, the two torch operators (4 us for a token) are faster than a call of ours.
MIN_SIZE = 2**14


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float = 7.0, alpha: float = 1.702) -> Tensor:
    """Activation of gpt-oss: (up + 1) * gate * sigmoid(alpha gate), with gate <= limit and |up| <= limit."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * (gate * alpha).sigmoid())


ACTIVATIONS = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu": lambda gate, up: F.gelu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "relu": lambda gate, up: F.relu(gate) * up,
    "clamped_swiglu": clamped_swiglu,
}
FUSED_ACTIVATIONS = frozenset(ACTIVATIONS) - {"gelu", "relu"}  # of the form x * sigmoid(...)


def gated_activation(act: str, gate: Tensor, up: Tensor, constants: tuple[float, float] | None = None) -> Tensor:
    """ACTIVATIONS[act](gate, up), usually act(gate) * up, for tensors of equal shape.

    `constants` are a limit and an alpha of `clamped_swiglu` other than those of the kernels.
    """
    if constants is not None:
        y = clamped_swiglu(gate, up, *constants)
    elif needs_reference(act, gate, up):
        y = ACTIVATIONS[act](gate, up)
    else:
        y = gated_activation_op(gate, up, act)
    return mark_recomputable(y, partial(gated_activation, act, constants=constants), gate, up)


def needs_reference(act: str, gate: Tensor, up: Tensor) -> bool:
    is_compatible = gate.shape == up.shape and gate.dtype == up.dtype
    return act not in FUSED_ACTIVATIONS or not is_compatible or use_torch_fallback(gate, compiled, MIN_SIZE)


class GluSizes(ctypes.Structure):
    """Sizes of a call; mirrors the struct in glu.cpp."""

    _fields_ = (
        ("num_rows", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("gate_stride", ctypes.c_int64),
        ("up_stride", ctypes.c_int64),
        ("grad_stride", ctypes.c_int64),
        ("num_threads", ctypes.c_int),
    )


@cache
def compiled() -> ctypes.CDLL | None:
    lib = load_library(SOURCE)
    if lib is not None:
        for name in (f"{act}_{dtype}" for act in FUSED_ACTIVATIONS for dtype in DTYPES.values()):
            getattr(lib, f"forward_{name}").argtypes = [*[ctypes.c_void_p] * 3, ctypes.POINTER(GluSizes)]
            getattr(lib, f"backward_{name}").argtypes = [*[ctypes.c_void_p] * 5, ctypes.POINTER(GluSizes)]
    return lib


def as_rows(*tensors: Tensor) -> list[Tensor]:
    """Tensors of equal shape as rows (N, dim), or as one long row each if all of them are contiguous."""
    if all(t.is_contiguous() for t in tensors):
        return [t.view(1, -1) for t in tensors]
    return [contiguous_rows(t) for t in tensors]


def forward(gate: Tensor, up: Tensor, act: str) -> Tensor:
    check_tensor("gated_activation", "up", up, gate.shape, gate.dtype, gate.device)
    (g, u), y = as_rows(gate, up), gate.new_empty(gate.shape)
    if gate.device.type == "cuda":
        triton_kernels("glu").forward(g, u, y, act)
    else:
        sizes = GluSizes(*g.shape, g.stride(0), u.stride(0), 0, torch.get_num_threads())
        kernel = getattr(compiled(), f"forward_{act}_{DTYPES[gate.dtype]}")
        kernel(g.data_ptr(), u.data_ptr(), y.data_ptr(), sizes)
    return y


gated_activation_op = KernelOp("gated_activation", forward)


def compute_gradients(grad: Tensor, gate: Tensor, up: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up. The activation is recomputed from the inputs."""
    for name, x in (("grad", grad), ("up", up)):
        check_tensor("gated_activation", name, x, gate.shape, gate.dtype, gate.device)
    (dy, g, u), grad_gate, grad_up = as_rows(grad, gate, up), gate.new_empty(gate.shape), up.new_empty(up.shape)
    if gate.device.type == "cuda":
        triton_kernels("glu").backward(dy, g, u, grad_gate, grad_up, act)
    else:
        sizes = GluSizes(*g.shape, g.stride(0), u.stride(0), dy.stride(0), torch.get_num_threads())
        kernel = getattr(compiled(), f"backward_{act}_{DTYPES[gate.dtype]}")
        kernel(*(t.data_ptr() for t in (dy, g, u, grad_gate, grad_up)), sizes)
    return grad_gate, grad_up


gated_activation_backward_op = KernelOp("gated_activation_backward", compute_gradients)


@gated_activation_op.register_fake
def _(gate: Tensor, up: Tensor, act: str) -> Tensor:
    return gate.new_empty(gate.shape)


@gated_activation_backward_op.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor, act: str) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.act = inputs
    ctx.save_for_backward(*tensors)


def gated_activation_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *gated_activation_backward_op(grad, *ctx.saved_tensors, ctx.act), None


gated_activation_op.register_autograd(gated_activation_backward, setup_context)
