"""Quantization types: those that gguf can write, their maximum errors, and detection of larger errors."""

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tunekit.errors import UserError
from tunekit.export.quant_types import (
    ERROR_PER_MAX,
    ERROR_PER_RANGE,
    FLOAT_TYPES,
    QUANT_TYPES,
    decode_tensor,
    encode_tensor,
    max_rounding_error,
    parse_quant_type,
    tensor_bytes,
)

KINDS = (*FLOAT_TYPES, *ERROR_PER_MAX, *ERROR_PER_RANGE)
PLAIN = {gguf.GGMLQuantizationType[name] for name in ("I8", "I16", "I32", "I64", "F64")}


def test_all_types_of_gguf_are_offered() -> None:
    """Fails if a newer gguf can write more types."""
    writable = set()
    for kind in set(gguf.GGMLQuantizationType) - PLAIN:
        try:
            gguf.quants.quantize(np.zeros((1, 256), np.float32), kind)
            writable.add(kind)
        except NotImplementedError:
            continue
    offered = {
        kind
        for encoding in QUANT_TYPES.values()
        for kind in (encoding.kind, encoding.head, encoding.embed, encoding.experts)
    } - {None}
    assert writable == offered == set(KINDS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), scale=st.floats(1e-4, 1e3), shift=st.floats(-2, 2))
def test_rounding_error_is_within_the_limit_of_the_type(
    kind: gguf.GGMLQuantizationType, seed: int, scale: float, shift: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    source = (torch.randn(3, 512, generator=generator) + shift) * scale
    source[1, :256] = 0
    coded = torch.from_numpy(np.array(encode_tensor(source, kind))).flatten().view(torch.uint8)
    assert coded.numel() == tensor_bytes(kind, (3, 512))
    decoded = decode_tensor(coded, kind, (3, 512)).float()
    assert max_rounding_error(source, decoded, kind) <= 1
    damaged = decoded.clone()
    damaged[2, 7] += 1.1 * source[2].abs().max()
    assert max_rounding_error(source, damaged, kind) > 1


@pytest.mark.parametrize("kind", [*FLOAT_TYPES, gguf.GGMLQuantizationType.Q8_0], ids=lambda kind: kind.name)
def test_bytes_equal_gguf(kind: gguf.GGMLQuantizationType) -> None:
    source = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    expected = gguf.quants.quantize(source.numpy(), kind)
    assert np.array_equal(encode_tensor(source, kind).reshape(-1).view(np.uint8), expected.reshape(-1).view(np.uint8))
    expected_bytes = torch.from_numpy(expected.copy()).flatten().view(torch.uint8)
    assert np.array_equal(
        decode_tensor(expected_bytes, kind, (5, 96)).float().numpy(), gguf.quants.dequantize(expected, kind)
    )


def test_tensors_of_three_dimensions() -> None:
    source = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0))
    kind = gguf.GGMLQuantizationType.Q8_0
    decoded = decode_tensor(torch.from_numpy(encode_tensor(source, kind)).flatten(), kind, (2, 3, 64))
    assert max_rounding_error(source, decoded, kind) <= 1


@pytest.mark.parametrize("quant_type", ["q4_k_m", "q6_k", "iq2_xs", "Q3_K_L"])
def test_type_that_gguf_cannot_write_is_rejected_with_a_command(quant_type: str) -> None:
    with pytest.raises(UserError) as error:
        parse_quant_type(quant_type)
    message = str(error.value)
    assert message.startswith(f"--type {quant_type}: ") and "f32, f16, bf16" in message
    assert f"llama-quantize model-bf16.gguf model-{quant_type}.gguf {quant_type}" in message


def test_unknown_type_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match=r"--type bf61: .*'bf16'.*f32"):
        parse_quant_type("bf61")


def test_nan_has_infinite_error() -> None:
    source, kind = torch.ones(1, 32), gguf.GGMLQuantizationType.F16
    assert max_rounding_error(source, torch.full((1, 32), torch.nan), kind) == torch.inf
    assert max_rounding_error(torch.full((1, 32), torch.nan), source, kind) == torch.inf
