"""A trivial Triton kernel, launched once to check that Triton works on this machine."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false
# Triton is not available on macOS and Windows.

import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError


@triton.jit
def store_one_kernel(x):
    tl.store(x, 1.0)


def launch(x: Tensor) -> None:
    """Store 1 into `x` (1,). Raises RuntimeError if the kernel cannot be compiled."""
    try:
        store_one_kernel[(1,)](x)
    except TritonError as error:
        raise RuntimeError(str(error)) from error
