"""Triton kernels of gated activations, forward and backward. Loaded by glu.py on GPUs."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false
# Triton is not available on macOS and Windows.

import triton
import triton.language as tl
from torch import Tensor

SIZE = 1024  # elements per program


@triton.jit
def place(dim, SIZE: tl.constexpr):
    """Row of a program, and its columns. The grid is 1D: one long row may exceed the limit of its second axis."""
    program, per_row = tl.program_id(0).to(tl.int64), (dim - 1) // SIZE + 1  # `dim + SIZE` may overflow int32
    return program // per_row, program % per_row * SIZE + tl.arange(0, SIZE)


@triton.jit
def sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def rate(x, ACT: tl.constexpr):
    """s(x) of the activation x sigmoid(s(x)), and its derivative.

    Has one `return`, with tensors: Python floats in branches would be constants of different types.
    """
    if ACT == "gelu_tanh":
        s = 1.5957691216 * (x + 0.044715 * x * x * x)
        slope = 1.5957691216 * (1 + 3 * 0.044715 * x * x)
    elif ACT == "clamped_swiglu":
        s = 1.702 * x
        slope = tl.full(x.shape, 1.702, tl.float32)
    else:
        s = x
        slope = tl.full(x.shape, 1.0, tl.float32)
    return s, slope


@triton.jit
def forward_kernel(  # noqa: PLR0913 (kernels take scalars as separate arguments)
    gate, up, y, gate_stride, up_stride, dim, ACT: tl.constexpr, SIZE: tl.constexpr
):
    row, at = place(dim, SIZE)
    real = at < dim
    kind = y.dtype.element_ty  # not in a tuple assignment: Triton would query the type of each element
    g = tl.load(gate + row * gate_stride + at, real, 0).to(tl.float32)
    u = tl.load(up + row * up_stride + at, real, 0).to(tl.float32)
    if ACT == "clamped_swiglu":  # rounds like its reference
        g, u = tl.minimum(g, 7.0), tl.maximum(tl.minimum(u, 7.0), -7.0)
        share = sigmoid((g * 1.702).to(kind).to(tl.float32)).to(kind).to(tl.float32)
        result = (u + 1).to(kind).to(tl.float32) * (g * share).to(kind).to(tl.float32)
    else:
        s, _ = rate(g, ACT)
        result = (g * sigmoid(s)).to(kind).to(tl.float32) * u
    tl.store(y + row * dim + at, result.to(kind), real)


@triton.jit
def backward_kernel(  # noqa: PLR0913
    grad, gate, up, to_gate, to_up, grad_stride, gate_stride, up_stride, dim, ACT: tl.constexpr, SIZE: tl.constexpr
):
    row, at = place(dim, SIZE)
    real = at < dim
    kind = to_gate.dtype.element_ty
    d = tl.load(grad + row * grad_stride + at, real, 0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + at, real, 0).to(tl.float32)
    u = tl.load(up + row * up_stride + at, real, 0).to(tl.float32)
    to_g, to_u = d, d
    if ACT == "clamped_swiglu":  # clamped values have no gradient
        to_g, to_u = tl.where(g <= 7.0, d, 0.0), tl.where(tl.abs(u) <= 7.0, d, 0.0)
        g, u = tl.minimum(g, 7.0), tl.maximum(tl.minimum(u, 7.0), -7.0) + 1
    s, slope = rate(g, ACT)
    share = sigmoid(s)
    tl.store(to_up + row * dim + at, (to_u * g * share).to(kind), real)
    tl.store(to_gate + row * dim + at, (to_g * u * share * (1 + g * (1 - share) * slope)).to(kind), real)


def forward(gate: Tensor, up: Tensor, y: Tensor, act: str) -> None:
    """Write act(gate) * up to `y`, for rows (N, dim)."""
    rows, dim = gate.shape
    if gate.numel():
        grid = (rows * triton.cdiv(dim, SIZE),)
        forward_kernel[grid](gate, up, y, gate.stride(0), up.stride(0), dim, ACT=act, SIZE=SIZE)


def backward(grad: Tensor, gate: Tensor, up: Tensor, to_gate: Tensor, to_up: Tensor, act: str) -> None:
    """Write the gradients of gate and up, for rows (N, dim)."""
    rows, dim = gate.shape
    if gate.numel():
        grid = (rows * triton.cdiv(dim, SIZE),)
        strides = grad.stride(0), gate.stride(0), up.stride(0)
        backward_kernel[grid](grad, gate, up, to_gate, to_up, *strides, dim, ACT=act, SIZE=SIZE)
