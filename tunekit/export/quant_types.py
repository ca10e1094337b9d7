"""Quantization types of GGUF files that the gguf package can write, and their maximum rounding errors."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, LlamaFileType, quants
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from tunekit.errors import UserError, did_you_mean

CHUNK_NUMEL = 2**22  # elements that are converted to fp32 at a time
FLOAT_TYPES = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}


@dataclass(frozen=True)
class QuantType:
    """Value of `--type`: the types of matrices. Vectors and norms are always fp32."""

    file_type: LlamaFileType
    kind: Kind
    head: Kind | None = None  # of the head or a tied embedding; None: as `kind`
    embed: Kind | None = None  # of an untied embedding; None: as `kind`
    experts: Kind | None = None
    drift: float = 0.0  # maximum mean difference of logits, in standard deviations


# llama-quantize uses a K-quant for the head of the smaller types. gguf cannot write it; the next larger type is Q8_0.
# Measured in nano: 0.012 with Q8_0, 0.06 with Q5, 0.13 with Q4_0, 0.74 with TQ2_0, which is for models trained with it.
# Unrelated logits differ by 1.1.
QUANT_TYPES = {
    "f32": QuantType(LlamaFileType.ALL_F32, Kind.F32, drift=1e-4),
    "f16": QuantType(LlamaFileType.MOSTLY_F16, Kind.F16, drift=0.00625),
    "bf16": QuantType(LlamaFileType.MOSTLY_BF16, Kind.BF16, drift=0.05),
    "q8_0": QuantType(LlamaFileType.MOSTLY_Q8_0, Kind.Q8_0, drift=0.15),
    "q5_1": QuantType(LlamaFileType.MOSTLY_Q5_1, Kind.Q5_1, Kind.Q8_0, drift=0.4),
    "q5_0": QuantType(LlamaFileType.MOSTLY_Q5_0, Kind.Q5_0, Kind.Q8_0, drift=0.4),
    "q4_1": QuantType(LlamaFileType.MOSTLY_Q4_1, Kind.Q4_1, Kind.Q8_0, drift=0.6),
    "q4_0": QuantType(LlamaFileType.MOSTLY_Q4_0, Kind.Q4_0, Kind.Q8_0, drift=0.6),
    "tq2_0": QuantType(LlamaFileType.MOSTLY_TQ2_0, Kind.TQ2_0, Kind.F16, Kind.F16, drift=0.6),
    "tq1_0": QuantType(LlamaFileType.MOSTLY_TQ1_0, Kind.TQ1_0, Kind.F16, Kind.F16, drift=0.6),
    "mxfp4_moe": QuantType(LlamaFileType.MOSTLY_MXFP4_MOE, Kind.Q8_0, experts=Kind.MXFP4, drift=0.6),
}
# Maximum error of a value, relative to the absolute maximum of its block, or to the range of the block.
ERROR_PER_MAX = {Kind.Q8_0: 1 / 254, Kind.Q5_0: 1 / 16, Kind.Q4_0: 1 / 8, Kind.TQ2_0: 1 / 2, Kind.TQ1_0: 1 / 2}
ERROR_PER_MAX |= {Kind.MXFP4: 1 / 2}
ERROR_PER_RANGE = {Kind.Q5_1: 1 / 62, Kind.Q4_1: 1 / 30}
FP16_ERROR = 2**-11  # relative rounding error of fp16, and absolute one of subnormal numbers
FP16_STEP = 2**-25


def parse_quant_type(name: str) -> QuantType:
    """Parse the value of `--type`. Raises UserError if it is unknown or not supported by the gguf package."""
    if name in QUANT_TYPES:
        return QUANT_TYPES[name]
    supported = f"supported: {', '.join(QUANT_TYPES)}"
    if f"MOSTLY_{name.upper()}" in LlamaFileType.__members__ or name.lower().startswith(("q", "iq")):
        raise UserError(
            f"--type {name}: the gguf package cannot write this type ({supported}). "
            f"Export bf16, then run: llama-quantize model-bf16.gguf model-{name}.gguf {name}"
        )
    raise UserError(f"--type {name}: no such type.{did_you_mean(name, QUANT_TYPES)} {supported.capitalize()}.")


def type_name_of(dtype: torch.dtype) -> str:
    """Name of the type that stores a dtype without rounding."""
    return next((name for name, quant_type in QUANT_TYPES.items() if FLOAT_TYPES.get(quant_type.kind) == dtype), "f32")


def fallback_type(kind: Kind, shape: tuple[int, ...]) -> Kind:
    """Return the type, or fp16 if the row length is not a multiple of its block size."""
    return Kind.F16 if shape[-1] % GGML_QUANT_SIZES[kind][0] else kind


def tensor_bytes(kind: Kind, shape: tuple[int, ...]) -> int:
    """Size of a tensor in a file, in bytes."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    return prod(shape) // block * block_bytes


def encode_tensor(tensor: Tensor, kind: Kind) -> np.ndarray:
    """Encode a tensor to bytes."""
    if kind in FLOAT_TYPES:
        return tensor.to(FLOAT_TYPES[kind]).contiguous().view(torch.uint8).numpy()
    rows = tensor.reshape(-1, tensor.shape[-1])
    encoded = np.empty((len(rows), tensor_bytes(kind, tensor.shape) // len(rows)), np.uint8)
    for chunk in chunk_slices(rows.shape):
        encoded[chunk] = quants.quantize(rows[chunk].float().numpy(), kind)
    return encoded


def decode_tensor(encoded: Tensor, kind: Kind, shape: tuple[int, ...]) -> Tensor:
    """Decode a tensor from its bytes (N,), to fp32 or a stored float type."""
    if kind in FLOAT_TYPES:
        return encoded.view(FLOAT_TYPES[kind]).view(shape)
    rows = encoded.view(prod(shape[:-1]), -1).numpy()
    values = torch.empty(len(rows), shape[-1])
    for chunk in chunk_slices(tuple(values.shape)):
        values[chunk] = torch.from_numpy(quants.dequantize(rows[chunk], kind))
    return values.view(shape)


def chunk_slices(shape: tuple[int, ...]) -> Iterator[slice]:
    """Chunks of rows with at most `CHUNK_NUMEL` elements."""
    step = max(CHUNK_NUMEL // shape[-1], 1)
    return (slice(i, i + step) for i in range(0, shape[0], step))


def max_rounding_error(source: Tensor, decoded: Tensor, kind: Kind) -> float:
    """Largest error relative to the allowed error of the type. Values above 1 are errors; NaN gives Inf."""
    block = GGML_QUANT_SIZES[kind][0]
    worst = 0.0
    for a, b in zip(split_blocks(source, block), split_blocks(decoded, block), strict=True):
        if not torch.equal(a, b):
            error = (a - b).abs()
            ratio = torch.where(error == 0, 0.0, error / allowed_error(a, kind))
            worst = max(worst, ratio.nan_to_num(nan=torch.inf, posinf=torch.inf).max().item())
    return worst


def split_blocks(tensor: Tensor, block: int) -> Iterator[Tensor]:
    """Iterate over the blocks of a tensor in fp32, in chunks (N, block)."""
    flat = tensor.reshape(-1, block)
    return (flat[chunk].float() for chunk in chunk_slices(tuple(flat.shape)))


def allowed_error(x: Tensor, kind: Kind) -> Tensor:
    """Maximum error of a type for the values of blocks (N, block), with a margin of 0.001 for the arithmetic."""
    if kind == Kind.F32:
        return torch.zeros_like(x)
    if kind == Kind.BF16:
        return x.abs() * 2**-8
    if kind == Kind.F16:
        return x.abs() * FP16_ERROR + FP16_STEP
    low, high = x.aminmax(dim=-1, keepdim=True)
    largest = torch.maximum(-low, high)
    if kind in ERROR_PER_MAX:
        return 1.001 * (largest * (ERROR_PER_MAX[kind] + FP16_ERROR)) + 127 * FP16_STEP
    return 1.001 * ((high - low) * (ERROR_PER_RANGE[kind] + FP16_ERROR) + largest * FP16_ERROR) + 127 * FP16_STEP
