"""The smallest Triton kernel, launched once to find out whether Triton works on a machine."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false
# There is no Triton on macOS and Windows.

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
