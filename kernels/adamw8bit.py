"""A step of AdamW with both moments in eight bits each, and one fp32 scale for 256 of them (arXiv:2110.02861).

A block ends where a row of its matrix does, so that the codes are the same however rows are divided over devices.

The codes are short floats with four bits of exponent: the first moment has a sign and three bits of mantissa, the root
of the second has four and no sign. The top code of a block is its largest number. Decoding and encoding are
shifts of bits. The dynamic code of the paper has its fine steps where numbers are large: with moments of one block that
differ a hundredfold it left the root of the second wrong by a factor of 30 (rms), and this one by 5 %.

The second moment moves by 1 - beta each step, less than half a step of its code, and would stand still if it were
rounded to the nearest. So it is rounded up or down by a threshold that walks evenly over all fractions from step to
step: what is lost in one step comes back in others, and the same run gives the same bits.
"""

import ctypes
import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.kernels.cpp_extension import load_library
from tunekit.kernels.triton_support import uses_triton

SOURCE = Path(__file__).with_suffix(".cpp")
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
BLOCK = 256  # numbers with one scale
REFERENCE_BLOCKS = 2**12  # blocks that the reference works on at once
FIRST_SHIFT, SECOND_SHIFT = 20, 19  # bits of an fp32 number that a code leaves out
MIN_EXPONENT = 112  # exponent of the lowest codes: the top one has 127
DITHER_STEP = 324019  # 2 ** SECOND times the golden ratio, odd


@dataclass(frozen=True)
class Moments:
    """Codes (n,) of the moments of n numbers, and the scales of their blocks, both in one (2, blocks)."""

    first: Tensor
    second: Tensor
    scales: Tensor
    row_length: int | None = None  # numbers of a row, whose last block may be shorter; none: all are one row

    @property
    def length(self) -> int:
        return max(1, len(self.first) if self.row_length is None else self.row_length)


@dataclass(frozen=True)
class AdamWHyperparams:
    """One step of AdamW: the rate, how much is decayed, and the `number` of the step, from 1 on."""

    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    step: int

    @property
    def factors(self) -> tuple[float, ...]:
        """What the numbers are multiplied with, and eps: the corrections of both moments are in them."""
        first, second = self.betas
        size = self.lr / (1 - first**self.step)
        root = 1 / math.sqrt(1 - second**self.step)
        return first, 1 - first, second, 1 - second, 1 - self.lr * self.weight_decay, size, root, self.eps


def adamw8bit_step(weight: Tensor, grad: Tensor, moments: Moments, rule: AdamWHyperparams) -> None:
    """Move `weight` (n,) and its moments in place."""
    if uses_triton(weight):
        gpu().step(weight, grad, moments, rule)
    elif weight.device.type == "cpu" and weight.dtype in DTYPES and compiled() is not None:
        places = (weight, grad, moments.first, moments.second, moments.scales)
        factors = (ctypes.c_float * 8)(*rule.factors)
        run = getattr(compiled(), f"step_{DTYPES[weight.dtype]}")
        sizes = weight.numel(), moments.length
        run(*(t.data_ptr() for t in places), *sizes, factors, rule.step, torch.get_num_threads())
    else:
        step_reference(weight, grad, moments, rule)


def step_reference(weight: Tensor, grad: Tensor, moments: Moments, rule: AdamWHyperparams) -> None:
    """The same, some blocks at a time: in fp32 all moments of a model would be as large as they were."""
    up, row = dither(rule.step, weight.device), moments.length
    for part, blocks in iter_parts(len(weight), row):
        columns = min(row, part.stop - part.start)
        codes = moments.first[part], moments.second[part]
        w, g, one, two = (to_blocks(t.view(-1, columns)) for t in (weight[part], grad[part], *codes))
        w, m, root = apply_step(w.float(), g.float(), one, two, moments.scales[:, blocks], rule.factors)
        weight[part] = from_blocks(w, columns)
        for code, scales, made in zip(codes, moments.scales, (encode_first(m), encode_second(root, up)), strict=True):
            code.copy_(from_blocks(made[0], columns))
            scales[blocks] = made[1]


def iter_parts(count: int, row: int) -> Iterator[tuple[slice, slice]]:
    """Numbers to work on at once, and their blocks: some rows, or a piece of a long one."""
    per, at = -(-row // BLOCK), 0
    step = max(1, REFERENCE_BLOCKS // per) * row if per <= REFERENCE_BLOCKS else REFERENCE_BLOCKS * BLOCK
    while at < count:
        stop = min(at + step, count if per <= REFERENCE_BLOCKS else (at // row + 1) * row)
        first, last = (i // row * per + -(-(i % row) // BLOCK) for i in (at, stop))
        yield slice(at, stop), slice(first, last)
        at = stop


def apply_step(w: Tensor, g: Tensor, first: Tensor, second: Tensor, scales: Tensor, factors: tuple[float, ...]) -> Any:
    """The weights behind the step, the first moment and the root of the second, all (blocks, 256) in fp32."""
    keep, new, keep_square, new_square, shrink, size, correct, eps = factors
    m = decode_first(first) * scales[0, :, None] * keep + g * new
    root = decode_second(second) * scales[1, :, None]
    root = (root * root * keep_square + g * g * new_square).sqrt()
    return w * shrink - m / (root * correct + eps) * size, m, root


def to_blocks(x: Tensor) -> Tensor:
    """Rows (rows, n) to (blocks, 256), with zeros behind each row."""
    return F.pad(x, (0, -x.shape[1] % BLOCK)).view(-1, BLOCK)


def from_blocks(x: Tensor, columns: int) -> Tensor:
    """The way back from `blocked`, to one row."""
    return x.view(-1, -(-columns // BLOCK) * BLOCK)[:, :columns].flatten()


def decode_first(codes: Tensor) -> Tensor:
    size = (codes & 127).int()
    bits = torch.where(size > 0, (size + (MIN_EXPONENT << 3)) << FIRST_SHIFT, 0)
    return (bits | ((codes & 128).int() << 24)).view(torch.float32)


def decode_second(codes: Tensor) -> Tensor:
    size = codes.int()
    return torch.where(size > 0, (size + (MIN_EXPONENT << 4)) << SECOND_SHIFT, 0).view(torch.float32)


def encode_first(m: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (blocks, 256) and scales (blocks,)."""
    scales = m.abs().amax(1) / 1.875
    bits = normalize(m, scales).view(torch.int32)
    size = (((bits & 0x7FFFFFFF) + (1 << (FIRST_SHIFT - 1))) >> FIRST_SHIFT) - (MIN_EXPONENT << 3)
    return (size.clamp(0, 127) | (bits >> 24 & 128)).to(torch.uint8), scales


def encode_second(root: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """What is not zero has a code above zero: a step divides by it."""
    scales = root.amax(1) / 1.9375
    bits = normalize(root, scales).view(torch.int32)
    size = ((bits + up) >> SECOND_SHIFT) - (MIN_EXPONENT << 4)
    return torch.where(bits > 0, size.clamp(1, 255), 0).to(torch.uint8), scales


def normalize(x: Tensor, scales: Tensor) -> Tensor:
    return torch.where(scales[:, None] > 0, x / scales[:, None], 0.0)


def dither(number: int, device: torch.device) -> Tensor:
    """What each number of a block (256,) is raised by before it is cut off, in this step."""
    at = torch.arange(number, number + BLOCK, device=device)
    return (at * DITHER_STEP & ((1 << SECOND_SHIFT) - 1)).int()


@cache
def compiled() -> ctypes.CDLL | None:
    lib = load_library(SOURCE)
    if lib is not None:
        place = ctypes.c_void_p
        for name in DTYPES.values():
            arguments = [*[place] * 5, ctypes.c_int64, ctypes.c_int64, place, ctypes.c_int64, ctypes.c_int]
            getattr(lib, f"step_{name}").argtypes = arguments
    return lib


@cache
def gpu() -> Any:
    """What runs on a GPU, which is loaded only where there is one."""
    return importlib.import_module("tunekit.kernels.adamw8bit_triton")
