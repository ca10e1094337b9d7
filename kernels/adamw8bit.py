"""AdamW step with 8-bit moments and one fp32 scale per block of 256 values (arXiv:2110.02861).

Blocks do not cross rows of a matrix, so that codes do not depend on how rows are sharded.

Codes are floats with 4 exponent bits: the first moment has a sign and 3 mantissa bits, the square root of the second
moment has 4 mantissa bits and no sign. The largest code of a block is its maximum. Encoding and decoding are shifts.
The dynamic code of the paper is most accurate for large values: for moments of one block that differ by a factor of
100, its rms error of the square root was a factor of 30, that of this code is 5%.

A step changes the second moment by a factor of 1 - beta, which is less than half a code step, so rounding to nearest
would never change it. It is rounded with a dither threshold that covers all fractions uniformly over the steps. This
makes rounding unbiased over time, and deterministic.
"""

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.kernels.argument_checks import check_contiguous, check_tensor
from tunekit.kernels.cpp_extension import DTYPES, load_library
from tunekit.kernels.triton_support import triton_kernels, uses_triton

SOURCE = Path(__file__).with_suffix(".cpp")
BLOCK = 256  # values per scale
REFERENCE_BLOCKS = 2**12  # blocks that the reference processes at a time
FIRST_SHIFT, SECOND_SHIFT = 20, 19  # low bits of an fp32 value that a code omits
MIN_EXPONENT = 112  # biased exponent of the lowest codes; that of the highest codes is 127
DITHER_STEP = 324019  # 2**SECOND_SHIFT / golden ratio, rounded to an odd number


@dataclass(frozen=True)
class Moments:
    """Codes (n,) uint8 of both moments of n weights, and fp32 scales (2, blocks) of both."""

    first: Tensor
    second: Tensor
    scales: Tensor
    row_length: int | None = None  # values per row, whose last block may be shorter; None: one row

    @property
    def length(self) -> int:
        return max(1, len(self.first) if self.row_length is None else self.row_length)


@dataclass(frozen=True)
class AdamWHyperparams:
    """Hyperparameters of one AdamW step; `step` starts at 1."""

    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    step: int

    @property
    def factors(self) -> tuple[float, ...]:
        """Eight factors of the update, as the kernels take them. They include the bias corrections of both moments."""
        beta1, beta2 = self.betas
        decay, step_size = 1 - self.lr * self.weight_decay, self.lr / (1 - beta1**self.step)
        inverse_sqrt_bias_correction2 = 1 / math.sqrt(1 - beta2**self.step)
        return beta1, 1 - beta1, beta2, 1 - beta2, decay, step_size, inverse_sqrt_bias_correction2, self.eps


def adamw8bit_step(weight: Tensor, grad: Tensor, moments: Moments, hyperparams: AdamWHyperparams) -> None:
    """Update `weight` (n,) and its moments in place."""
    check_inputs(weight, grad, moments)
    if uses_triton(weight):
        triton_kernels("adamw8bit").step(weight, grad, moments, hyperparams)
    elif weight.device.type == "cpu" and weight.dtype in DTYPES and compiled() is not None:
        tensors = (weight, grad, moments.first, moments.second, moments.scales)
        factors = (ctypes.c_float * 8)(*hyperparams.factors)
        kernel = getattr(compiled(), f"step_{DTYPES[weight.dtype]}")
        sizes = weight.numel(), moments.length
        kernel(*(t.data_ptr() for t in tensors), *sizes, factors, hyperparams.step, torch.get_num_threads())
    else:
        step_reference(weight, grad, moments, hyperparams)


def check_inputs(weight: Tensor, grad: Tensor, moments: Moments) -> None:
    """Raise ValueError unless the gradient and the moments fit the weight."""
    count, row, device = weight.numel(), moments.length, weight.device
    if count % row:
        raise ValueError(f"adamw8bit: weight has shape {tuple(weight.shape)}, expected a multiple of {row} values")
    check_tensor("adamw8bit", "grad", grad, (count,), weight.dtype, device)
    check_tensor("adamw8bit", "moments.first", moments.first, (count,), torch.uint8, device)
    check_tensor("adamw8bit", "moments.second", moments.second, (count,), torch.uint8, device)
    num_blocks = count // row * -(-row // BLOCK)
    check_tensor("adamw8bit", "moments.scales", moments.scales, (2, num_blocks), torch.float32, device)
    for name, x in (("weight", weight), ("grad", grad), ("moments.first", moments.first)):
        check_contiguous("adamw8bit", name, x)
    check_contiguous("adamw8bit", "moments.second", moments.second)
    check_contiguous("adamw8bit", "moments.scales", moments.scales)


def step_reference(weight: Tensor, grad: Tensor, moments: Moments, hyperparams: AdamWHyperparams) -> None:
    """Torch reference of `adamw8bit_step`. Works by chunks of blocks, to avoid fp32 copies of all moments."""
    dither_bits, row = dither(hyperparams.step, weight.device), moments.length
    for span, blocks in iter_chunks(len(weight), row):
        columns = min(row, span.stop - span.start)
        codes = moments.first[span], moments.second[span]
        w, g, first, second = (to_blocks(t.view(-1, columns)) for t in (weight[span], grad[span], *codes))
        w, m, sqrt_v = apply_step(w.float(), g.float(), first, second, moments.scales[:, blocks], hyperparams.factors)
        weight[span] = from_blocks(w, columns)
        for code, scales, encoded in zip(
            codes, moments.scales, (encode_first(m), encode_second(sqrt_v, dither_bits)), strict=True
        ):
            code.copy_(from_blocks(encoded[0], columns))
            scales[blocks] = encoded[1]


def iter_chunks(count: int, row_length: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of values and of their blocks: some rows at a time, or chunks of a long row."""
    blocks_per_row, start = -(-row_length // BLOCK), 0
    step = (
        max(1, REFERENCE_BLOCKS // blocks_per_row) * row_length
        if blocks_per_row <= REFERENCE_BLOCKS
        else REFERENCE_BLOCKS * BLOCK
    )
    while start < count:
        stop = min(
            start + step, count if blocks_per_row <= REFERENCE_BLOCKS else (start // row_length + 1) * row_length
        )
        first, last = (i // row_length * blocks_per_row + -(-(i % row_length) // BLOCK) for i in (start, stop))
        yield slice(start, stop), slice(first, last)
        start = stop


def apply_step(w: Tensor, g: Tensor, first: Tensor, second: Tensor, scales: Tensor, factors: tuple[float, ...]) -> Any:
    """Updated weights, first moment and square root of the second moment, all (blocks, 256) in fp32."""
    beta1, one_minus_beta1, beta2, one_minus_beta2, decay, step_size, inverse_sqrt_bias_correction2, eps = factors
    m = decode_first(first) * scales[0, :, None] * beta1 + g * one_minus_beta1
    sqrt_v = decode_second(second) * scales[1, :, None]
    sqrt_v = (sqrt_v * sqrt_v * beta2 + g * g * one_minus_beta2).sqrt()
    denom = sqrt_v * inverse_sqrt_bias_correction2 + eps
    return w * decay - m / denom * step_size, m, sqrt_v


def to_blocks(x: Tensor) -> Tensor:
    """Reshape rows (rows, n) to (blocks, 256), padding each row with zeros."""
    return F.pad(x, (0, -x.shape[1] % BLOCK)).view(-1, BLOCK)


def from_blocks(x: Tensor, columns: int) -> Tensor:
    """Inverse of `to_blocks`, flattened."""
    return x.view(-1, -(-columns // BLOCK) * BLOCK)[:, :columns].flatten()


def decode_first(codes: Tensor) -> Tensor:
    magnitude = (codes & 127).int()
    bits = torch.where(magnitude > 0, (magnitude + (MIN_EXPONENT << 3)) << FIRST_SHIFT, 0)
    return (bits | ((codes & 128).int() << 24)).view(torch.float32)


def decode_second(codes: Tensor) -> Tensor:
    magnitude = codes.int()
    return torch.where(magnitude > 0, (magnitude + (MIN_EXPONENT << 4)) << SECOND_SHIFT, 0).view(torch.float32)


def encode_first(m: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (blocks, 256) and scales (blocks,)."""
    scales = m.abs().amax(1) / 1.875
    bits = normalize(m, scales).view(torch.int32)
    magnitude = (((bits & 0x7FFFFFFF) + (1 << (FIRST_SHIFT - 1))) >> FIRST_SHIFT) - (MIN_EXPONENT << 3)
    return (magnitude.clamp(0, 127) | (bits >> 24 & 128)).to(torch.uint8), scales


def encode_second(sqrt_v: Tensor, dither_bits: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (blocks, 256) and scales (blocks,). Nonzero values get nonzero codes, because steps divide by them."""
    scales = sqrt_v.amax(1) / 1.9375
    bits = normalize(sqrt_v, scales).view(torch.int32)
    magnitude = ((bits + dither_bits) >> SECOND_SHIFT) - (MIN_EXPONENT << 4)
    return torch.where(bits > 0, magnitude.clamp(1, 255), 0).to(torch.uint8), scales


def normalize(x: Tensor, scales: Tensor) -> Tensor:
    return torch.where(scales[:, None] > 0, x / scales[:, None], 0.0)


def dither(step: int, device: torch.device) -> Tensor:
    """Dither (256,) that is added to the bits of the values of a block before truncation."""
    index = torch.arange(step, step + BLOCK, device=device)
    return (index * DITHER_STEP & ((1 << SECOND_SHIFT) - 1)).int()


@cache
def compiled() -> ctypes.CDLL | None:
    lib = load_library(SOURCE)
    if lib is not None:
        pointer = ctypes.c_void_p
        for name in DTYPES.values():
            arguments = [*[pointer] * 5, ctypes.c_int64, ctypes.c_int64, pointer, ctypes.c_int64, ctypes.c_int]
            getattr(lib, f"step_{name}").argtypes = arguments
    return lib
