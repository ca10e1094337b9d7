"""Types of numbers: those that gguf can write, how far each may stray, and that more is found."""

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tunekit.errors import UserError
from tunekit.export.quant_types import (
    DENSE,
    ENCODINGS,
    LARGEST,
    SPAN,
    decode_tensor,
    encode_tensor,
    max_rounding_error,
    parse_quant_type,
    tensor_bytes,
)

KINDS = (*DENSE, *LARGEST, *SPAN)
PLAIN = {gguf.GGMLQuantizationType[name] for name in ("I8", "I16", "I32", "I64", "F64")}


def test_all_that_gguf_can_write_is_offered() -> None:
    """A newer gguf that writes more fails here, to be looked at."""
    can = set()
    for kind in set(gguf.GGMLQuantizationType) - PLAIN:
        try:
            gguf.quants.quantize(np.zeros((1, 256), np.float32), kind)
            can.add(kind)
        except NotImplementedError:
            continue
    offered = {kind for one in ENCODINGS.values() for kind in (one.kind, one.head, one.embed, one.experts)} - {None}
    assert can == offered == set(KINDS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), scale=st.floats(1e-4, 1e3), shift=st.floats(-2, 2))
def test_no_number_strays_further_than_its_type_allows(
    kind: gguf.GGMLQuantizationType, seed: int, scale: float, shift: float
) -> None:
    draw = torch.Generator().manual_seed(seed)
    source = (torch.randn(3, 512, generator=draw) + shift) * scale
    source[1, :256] = 0
    coded = torch.from_numpy(np.array(encode_tensor(source, kind))).flatten().view(torch.uint8)
    assert coded.numel() == tensor_bytes(kind, (3, 512))
    found = decode_tensor(coded, kind, (3, 512)).float()
    assert max_rounding_error(source, found, kind) <= 1
    worse = found.clone()
    worse[2, 7] += 1.1 * source[2].abs().max()
    assert max_rounding_error(source, worse, kind) > 1


@pytest.mark.parametrize("kind", [*DENSE, gguf.GGMLQuantizationType.Q8_0], ids=lambda kind: kind.name)
def test_bytes_are_those_of_gguf(kind: gguf.GGMLQuantizationType) -> None:
    source = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    theirs = gguf.quants.quantize(source.numpy(), kind)
    assert np.array_equal(encode_tensor(source, kind).reshape(-1).view(np.uint8), theirs.reshape(-1).view(np.uint8))
    ours = torch.from_numpy(theirs.copy()).flatten().view(torch.uint8)
    assert np.array_equal(decode_tensor(ours, kind, (5, 96)).float().numpy(), gguf.quants.dequantize(theirs, kind))


def test_tensors_of_three_axes() -> None:
    source = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0))
    kind = gguf.GGMLQuantizationType.Q8_0
    found = decode_tensor(torch.from_numpy(encode_tensor(source, kind)).flatten(), kind, (2, 3, 64))
    assert max_rounding_error(source, found, kind) <= 1


@pytest.mark.parametrize("word", ["q4_k_m", "q6_k", "iq2_xs", "Q3_K_L"])
def test_what_gguf_cannot_write_is_refused_with_the_way_there(word: str) -> None:
    with pytest.raises(UserError) as refusal:
        parse_quant_type(word)
    told = str(refusal.value)
    assert told.startswith(f"--type {word}: the gguf package cannot write this type (can be written: f32, f16, bf16")
    assert told.endswith(f"export bf16, then: llama-quantize model-bf16.gguf model-{word}.gguf {word}")


def test_a_wrong_word_is_told_the_nearest() -> None:
    with pytest.raises(UserError, match=r"--type bf61: no such type, did you mean 'bf16'\? \(can be written: f32"):
        parse_quant_type("bf61")


def test_no_number_is_no_stray() -> None:
    source, kind = torch.ones(1, 32), gguf.GGMLQuantizationType.F16
    assert max_rounding_error(source, torch.full((1, 32), torch.nan), kind) == torch.inf
    assert max_rounding_error(torch.full((1, 32), torch.nan), source, kind) == torch.inf
