"""Gated activations on a GPU, in one pass each way. glu.py loads this where there is one."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false
# There is no Triton on macOS and Windows, nor a GPU that would load this file.

import triton
import triton.language as tl
from torch import Tensor

SIZE = 1024  # numbers of one program


@triton.jit
def place(dim, SIZE: tl.constexpr):
    """The row of a program, and its columns. One long row may have more parts than a grid has in its second axis."""
    program, many = tl.program_id(0).to(tl.int64), (dim - 1) // SIZE + 1  # `dim + SIZE` may not fit an int32
    return program // many, program % many * SIZE + tl.arange(0, SIZE)


@triton.jit
def sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def rate(x, ACT: tl.constexpr):
    """s(x) of x sigmoid(s(x)), and its derivative.

    A compiled function has one `return`, and tensors in it: floats of branches would be constants of different types.
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
def forward_kernel(  # noqa: PLR0913 (a launch has no other way to pass them)
    gate, up, y, gate_stride, up_stride, dim, ACT: tl.constexpr, SIZE: tl.constexpr
):
    row, at = place(dim, SIZE)
    real = at < dim
    kind = y.dtype.element_ty  # not in a tuple: the compiler asks the type of each of its elements
    g = tl.load(gate + row * gate_stride + at, real, 0).to(tl.float32)
    u = tl.load(up + row * up_stride + at, real, 0).to(tl.float32)
    if ACT == "clamped_swiglu":  # rounded where its reference rounds
        g, u = tl.minimum(g, 7.0), tl.maximum(tl.minimum(u, 7.0), -7.0)
        share = sigmoid((g * 1.702).to(kind).to(tl.float32)).to(kind).to(tl.float32)
        found = (u + 1).to(kind).to(tl.float32) * (g * share).to(kind).to(tl.float32)
    else:
        s, _ = rate(g, ACT)
        found = (g * sigmoid(s)).to(kind).to(tl.float32) * u
    tl.store(y + row * dim + at, found.to(kind), real)


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
    if ACT == "clamped_swiglu":  # no gradient flows where a number was brought within the bounds
        to_g, to_u = tl.where(g <= 7.0, d, 0.0), tl.where(tl.abs(u) <= 7.0, d, 0.0)
        g, u = tl.minimum(g, 7.0), tl.maximum(tl.minimum(u, 7.0), -7.0) + 1
    s, slope = rate(g, ACT)
    share = sigmoid(s)
    tl.store(to_up + row * dim + at, (to_u * g * share).to(kind), real)
    tl.store(to_gate + row * dim + at, (to_g * u * share * (1 + g * (1 - share) * slope)).to(kind), real)


def forward(gate: Tensor, up: Tensor, y: Tensor, act: str) -> None:
    """Fill `y` from rows (N, dim) of both."""
    rows, dim = gate.shape
    if gate.numel():
        grid = (rows * triton.cdiv(dim, SIZE),)
        forward_kernel[grid](gate, up, y, gate.stride(0), up.stride(0), dim, ACT=act, SIZE=SIZE)


def backward(grad: Tensor, gate: Tensor, up: Tensor, to_gate: Tensor, to_up: Tensor, act: str) -> None:
    """Fill the gradients of both."""
    rows, dim = gate.shape
    if gate.numel():
        grid = (rows * triton.cdiv(dim, SIZE),)
        strides = grad.stride(0), gate.stride(0), up.stride(0)
        backward_kernel[grid](grad, gate, up, to_gate, to_up, *strides, dim, ACT=act, SIZE=SIZE)
