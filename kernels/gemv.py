"""Matmul of few rows, as in generation: bf16 on a CPU, limited by memory bandwidth."""

import ctypes
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.kernels.cpp_extension import load_library

MAX_ROWS = 16
SOURCE = Path(__file__).with_name("gemv.cpp")


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: (..., in) to (..., out)."""
    lib = compiled() if is_supported(x, weight, bias) else None
    if lib is None or x.numel() > max_tokens() * weight.shape[1]:
        return F.linear(x, weight, bias)
    x = x.contiguous()
    rows, width = weight.shape
    y = x.new_empty(*x.shape[:-1], rows)
    pointers = x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr()
    lib.gemv(*pointers, x.numel() // width, rows, width, weight.stride(0), torch.get_num_threads())
    return y


def is_supported(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the inputs are bf16 on the CPU with few rows, and no gradient is needed.

    Inputs whose shapes do not match are not supported: F.linear reports them.
    """
    return (
        x.dtype == weight.dtype == torch.bfloat16
        and 0 < x.numel() <= MAX_ROWS * weight.shape[1]
        and x.device.type == weight.device.type == "cpu"
        and x.shape[-1] == weight.shape[1]
        and weight.stride(1) == 1
        and (bias is None or is_supported_bias(bias, weight))
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )


def is_supported_bias(bias: Tensor, weight: Tensor) -> bool:
    return (
        bias.dtype == torch.bfloat16
        and bias.device == weight.device
        and bias.shape == weight.shape[:1]
        and bias.is_contiguous()
    )


@cache
def max_tokens() -> int:
    """Number of rows up to which the kernel is faster than F.linear on this CPU."""
    lib = compiled()
    return 0 if lib is None else lib.max_tokens()


@cache
def compiled() -> ctypes.CDLL | None:
    """Compiled library, if it is available and the CPU has bf16 dot products."""
    lib = load_library(SOURCE)
    if lib is None:
        return None
    lib.is_supported.restype = ctypes.c_bool
    lib.gemv.argtypes = [*[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 4, ctypes.c_int]
    return lib if lib.is_supported() else None
