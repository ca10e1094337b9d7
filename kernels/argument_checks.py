"""Checks of arguments of kernels, which read and write memory without bounds checks.

Entry points call them before they pass pointers to C++ or Triton. Checks read shapes, strides, dtypes and devices, so
they do not synchronize. Only `check_index_range` reads values; it is for tensors on the CPU.
"""

import torch
from torch import Tensor


def check_tensor(
    kernel: str, name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise ValueError unless the tensor has this shape, dtype and device."""
    if x.shape != shape or x.dtype != dtype or x.device != device:  # no calls: generation checks thousands per second
        check_shape(kernel, name, x, shape)
        check_dtype(kernel, name, x, dtype)
        raise ValueError(f"{kernel}: {name} is on {x.device}, expected {device}")


def check_shape(kernel: str, name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the tensor has this shape."""
    if x.shape != shape:
        raise ValueError(f"{kernel}: {name} has shape {tuple(x.shape)}, expected {tuple(shape)}")


def check_dim(kernel: str, name: str, x: Tensor, dim: int) -> None:
    """Raise ValueError unless the tensor has this number of dimensions."""
    if x.dim() != dim:
        raise ValueError(f"{kernel}: {name} has shape {tuple(x.shape)}, expected {dim} dimensions")


def check_dtype(kernel: str, name: str, x: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError unless the tensor has this dtype."""
    if x.dtype != dtype:
        raise ValueError(f"{kernel}: {name} has dtype {x.dtype}, expected {dtype}")


def check_contiguous(kernel: str, name: str, x: Tensor) -> None:
    """Raise ValueError unless the tensor is contiguous."""
    if not x.is_contiguous():
        raise ValueError(f"{kernel}: {name} has strides {x.stride()}, expected a contiguous tensor")


def check_contiguous_rows(kernel: str, name: str, x: Tensor) -> None:
    """Raise ValueError unless the tensor is a matrix whose rows are contiguous."""
    if x.dim() != 2 or x.stride(1) != 1:
        raise ValueError(f"{kernel}: {name} has shape {tuple(x.shape)}, strides {x.stride()}, expected contiguous rows")


def check_index_range(kernel: str, name: str, index: Tensor, stop: int) -> None:
    """Raise IndexError unless all values are in [0, stop). Reads the values once."""
    if index.numel():
        smallest, largest = (int(x) for x in index.aminmax())
        if smallest < 0 or largest >= stop:
            raise IndexError(f"{kernel}: {name} has values from {smallest} to {largest}, expected [0, {stop})")
