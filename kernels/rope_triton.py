"""Triton kernel of RoPE. Loaded by rope.py on GPUs."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# Triton is not available on macOS and Windows.

import triton
import triton.language as tl
from torch import Tensor

BLOCK_NUMEL = 2048  # elements per program: 4,096 took 128 registers per thread, and spilled with Triton 3.6


@triton.jit
def rotate_kernel(  # noqa: PLR0913 (kernels take scalars as separate arguments)
    x, y, cos, sin, num_heads, head_dim, num_pairs, start, token_stride, head_stride, sign,
    HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    IS_INPUT_INTERLEAVED: tl.constexpr, IS_OUTPUT_INTERLEAVED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    # int64: heads of long rows may be far apart
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]).to(tl.int64)
    channel = tl.arange(0, BLOCK_SIZE)[None, :]  # of the output
    mask = (head < num_heads) & (channel < head_dim)
    index = channel - start  # among the rotated channels
    is_rotated = (index >= 0) & (index < 2 * num_pairs)
    pair = index // 2 if IS_OUTPUT_INTERLEAVED else tl.where(index < num_pairs, index, index - num_pairs)
    is_second = index % 2 == 1 if IS_OUTPUT_INTERLEAVED else index >= num_pairs
    # Input channels: the one of this output, and the other one of the pair
    if IS_INPUT_INTERLEAVED:
        same = 2 * pair + is_second.to(tl.int32)
        partner = 2 * pair + 1 - is_second.to(tl.int32)
    else:
        same = pair + num_pairs * is_second.to(tl.int32)
        partner = pair + num_pairs - num_pairs * is_second.to(tl.int32)
    x_head = x + token * token_stride + head * head_stride
    # If the channel order does not change, the compiler can vectorize this load.
    source = channel if IS_INPUT_INTERLEAVED == IS_OUTPUT_INTERLEAVED else tl.where(is_rotated, same + start, channel)
    unrotated = tl.load(x_head + source, mask, 0)
    a = unrotated.to(tl.float32)
    b = tl.load(x_head + partner + start, mask & is_rotated, 0).to(tl.float32)
    c = tl.load(cos + token * num_pairs + pair, is_rotated, 1)
    signed_sin = tl.load(sin + token * num_pairs + pair, is_rotated, 0) * tl.where(is_second, sign, -sign)
    result = tl.where(is_rotated, (a * c + b * signed_sin).to(y.dtype.element_ty), unrotated)
    tl.store(y + (token * num_heads + head) * head_dim + channel, result, mask)


def rotate(  # noqa: PLR0913
    x: Tensor,
    y: Tensor,
    cos: Tensor,
    sin: Tensor,
    start: int,
    sign: float,
    is_input_interleaved: bool,
    is_output_interleaved: bool,
) -> None:
    """Write rotated heads (T, H, D) to `y`. Tables are (T, pairs); rotated channels begin at `start`."""
    num_tokens, num_heads, head_dim = x.shape
    block_size = triton.next_power_of_2(head_dim)
    heads_per_program = min(triton.next_power_of_2(max(num_heads, 1)), max(1, BLOCK_NUMEL // block_size))
    if x.numel():
        rotate_kernel[(num_tokens, triton.cdiv(num_heads, heads_per_program))](
            x, y, cos, sin, num_heads, head_dim, cos.shape[1], start, *x.stride()[:2], sign,
            HEADS=heads_per_program, BLOCK_SIZE=block_size,
            IS_INPUT_INTERLEAVED=is_input_interleaved, IS_OUTPUT_INTERLEAVED=is_output_interleaved,
            enable_fp_fusion=False,
        )  # fmt: skip
