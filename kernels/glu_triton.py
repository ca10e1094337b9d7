"""Triton kernels of gated activations, forward and backward. Loaded by glu.py on GPUs."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false
# Triton is not available on macOS and Windows.

import triton
import triton.language as tl
from torch import Tensor

BLOCK_SIZE = 1024  # elements per program
ALPHA, LIMIT = tl.constexpr(1.702), tl.constexpr(7.0)  # of clamped_swiglu


@triton.jit
def locate_block(dim, BLOCK_SIZE: tl.constexpr):
    """Row of a program, and its columns. The grid is 1D: one long row may exceed the limit of its second axis."""
    # `dim + BLOCK_SIZE` may overflow int32
    program, blocks_per_row = tl.program_id(0).to(tl.int64), (dim - 1) // BLOCK_SIZE + 1
    return program // blocks_per_row, program % blocks_per_row * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)


@triton.jit
def sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def compute_sigmoid_input(x, ACT: tl.constexpr):
    """s(x) of the activation x sigmoid(s(x)), and its derivative.

    Has one `return`, with tensors: Python floats in branches would be constants of different types.
    """
    if ACT == "gelu_tanh":
        s = 1.5957691216 * (x + 0.044715 * x * x * x)
        derivative = 1.5957691216 * (1 + 3 * 0.044715 * x * x)
    elif ACT == "clamped_swiglu":
        s = ALPHA * x
        derivative = tl.full(x.shape, ALPHA, tl.float32)
    else:
        s = x
        derivative = tl.full(x.shape, 1.0, tl.float32)
    return s, derivative


@triton.jit
def forward_kernel(  # noqa: PLR0913 (kernels take scalars as separate arguments)
    gate, up, y, gate_stride, up_stride, dim, ACT: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    row, columns = locate_block(dim, BLOCK_SIZE)
    mask = columns < dim
    dtype = y.dtype.element_ty  # not in a tuple assignment: Triton would query the type of each element
    g = tl.load(gate + row * gate_stride + columns, mask, 0).to(tl.float32)
    u = tl.load(up + row * up_stride + columns, mask, 0).to(tl.float32)
    if ACT == "clamped_swiglu":  # rounds like its reference
        g, u = tl.minimum(g, LIMIT), tl.maximum(tl.minimum(u, LIMIT), -LIMIT)
        sig = sigmoid((g * ALPHA).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        result = (u + 1).to(dtype).to(tl.float32) * (g * sig).to(dtype).to(tl.float32)
    else:
        s, _ = compute_sigmoid_input(g, ACT)
        result = (g * sigmoid(s)).to(dtype).to(tl.float32) * u
    tl.store(y + row * dim + columns, result.to(dtype), mask)


@triton.jit
def backward_kernel(  # noqa: PLR0913
    grad_output, gate, up, grad_gate, grad_up, grad_stride, gate_stride, up_stride, dim,
    ACT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    row, columns = locate_block(dim, BLOCK_SIZE)
    mask = columns < dim
    dtype = grad_gate.dtype.element_ty
    dy = tl.load(grad_output + row * grad_stride + columns, mask, 0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + columns, mask, 0).to(tl.float32)
    u = tl.load(up + row * up_stride + columns, mask, 0).to(tl.float32)
    dy_gate, dy_up = dy, dy
    if ACT == "clamped_swiglu":  # clamped values have no gradient
        dy_gate, dy_up = tl.where(g <= LIMIT, dy, 0.0), tl.where(tl.abs(u) <= LIMIT, dy, 0.0)
        g, u = tl.minimum(g, LIMIT), tl.maximum(tl.minimum(u, LIMIT), -LIMIT) + 1
    s, derivative = compute_sigmoid_input(g, ACT)
    sig = sigmoid(s)
    tl.store(grad_up + row * dim + columns, (dy_up * g * sig).to(dtype), mask)
    tl.store(grad_gate + row * dim + columns, (dy_gate * u * sig * (1 + g * (1 - sig) * derivative)).to(dtype), mask)


def forward(gate: Tensor, up: Tensor, y: Tensor, act: str) -> None:
    """Write act(gate) * up to `y`, for rows (N, dim)."""
    num_rows, dim = gate.shape
    if gate.numel():
        grid = (num_rows * triton.cdiv(dim, BLOCK_SIZE),)
        forward_kernel[grid](gate, up, y, gate.stride(0), up.stride(0), dim, ACT=act, BLOCK_SIZE=BLOCK_SIZE)


def backward(grad_output: Tensor, gate: Tensor, up: Tensor, grad_gate: Tensor, grad_up: Tensor, act: str) -> None:
    """Write the gradients of gate and up, for rows (N, dim)."""
    num_rows, dim = gate.shape
    if gate.numel():
        grid = (num_rows * triton.cdiv(dim, BLOCK_SIZE),)
        strides = grad_output.stride(0), gate.stride(0), up.stride(0)
        backward_kernel[grid](grad_output, gate, up, grad_gate, grad_up, *strides, dim, ACT=act, BLOCK_SIZE=BLOCK_SIZE)
