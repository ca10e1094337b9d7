"""Rotary position embeddings, compared with complex multiplication and with transformers."""

import math
from dataclasses import replace

import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as apply_to_pairs
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests.helpers.random_checkpoints import relative_error
from tunekit.kernels.rope import RopeTables
from tunekit.kernels.rope import apply_rope as rotate_both
from tunekit.kernels.sequence_layout import SequenceLayout
from tunekit.models.rope import rope_tables
from tunekit.models.spec import LongRopeScaling, Rope

LONGROPE = LongRopeScaling(short=(1.0, 1.2, 1.5), long=(2.0, 3.0, 5.0), context=8, attention_factor=1.3)


def rotate(x: torch.Tensor, rotation: RopeTables) -> torch.Tensor:
    """Rotate queries; the keys are empty."""
    return rotate_both(x, x[:, :, :0], rotation)[0]


def test_rotation_is_complex_multiplication() -> None:
    """The pair (i, i + D/2) at position p is rotated by p * theta^(-2i/D)."""
    x, positions = torch.randn(2, 40, 3, 12), torch.arange(80).view(2, 40)
    pairs = torch.complex(x[..., :6].double(), x[..., 6:].double())
    angle = positions[..., None, None] * 500.0 ** (-torch.arange(6).double() / 6)
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    actual = rotate(x, rope_tables(Rope(500.0), 12, positions))
    assert relative_error(actual.double(), torch.cat([turned.real, turned.imag], dim=-1)) < 1e-5


def test_rotation_matches_transformers() -> None:
    x, positions = torch.randn(2, 9, 3, 12), torch.arange(9).expand(2, 9)
    rotation = rope_tables(Rope(100.0), 12, positions)
    expected, _ = apply_rotary_pos_emb(x.transpose(1, 2), x.transpose(1, 2), *transformers_tables(rotation))
    assert relative_error(rotate(x, rotation), expected.transpose(1, 2)) < 1e-6


def test_partial_rotation_leaves_other_channels() -> None:
    x, positions = torch.randn(2, 9, 3, 12), torch.arange(9).expand(2, 9)
    actual = rotate(x, rope_tables(Rope(dims=8), 12, positions))
    assert torch.equal(actual[..., 8:], x[..., 8:])
    assert torch.equal(actual[..., :8], rotate(x[..., :8], rope_tables(Rope(), 8, positions)))


def test_scores_depend_only_on_the_distance() -> None:
    """Scores depend only on the distance of query and key."""
    q, k = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(0))

    def score(at: int, to: int) -> float:
        turned = [rotate(x, rope_tables(Rope(), 16, torch.tensor([[p]]))) for x, p in ((q, at), (k, to))]
        return (turned[0] * turned[1]).sum().item()

    assert math.isclose(score(7, 3), score(1007, 1003), rel_tol=1e-3, abs_tol=1e-3)
    assert not math.isclose(score(7, 3), score(7, 2), rel_tol=1e-2)


def transformers_tables(rotation: RopeTables) -> list[torch.Tensor]:
    """Tables in the format of transformers, which repeats each angle."""
    return [torch.cat([t, t], dim=-1).squeeze(2) for t in (rotation.cos, rotation.sin)]


def test_interleaved_rotation_matches_transformers() -> None:
    """Adjacent pairs stay adjacent in GLM and become halves in DeepSeek."""
    x, positions = torch.randn(2, 9, 3, 12), torch.arange(9).expand(2, 9)
    rope = Rope(100.0, dims=8, interleaved=True)
    rotation = rope_tables(rope, 12, positions)
    expected, _ = apply_to_pairs(x.transpose(1, 2), x.transpose(1, 2), *transformers_tables(rotation))
    assert relative_error(rotate(x, rotation), expected.transpose(1, 2)) < 1e-6
    x = x[..., :8]
    rotation = rope_tables(replace(rope, interleaved_output=False), 8, positions)
    expected, _ = apply_rotary_pos_emb_interleave(x.transpose(1, 2), x.transpose(1, 2), *transformers_tables(rotation))
    assert relative_error(rotate(x, rotation), expected.transpose(1, 2)) < 1e-6


def test_padded_frequencies_rotate_the_first_channels_of_each_half() -> None:
    x, positions = torch.randn(2, 9, 3, 16), torch.arange(9).expand(2, 9)
    actual = rotate(x, rope_tables(Rope(100.0, dims=8, pad=True), 16, positions))
    fixed_channels = [*range(4, 8), *range(12, 16)]
    assert torch.equal(actual[..., fixed_channels], x[..., fixed_channels])
    # equal to a full rotation in the rotated channels
    full = rotate(x, rope_tables(Rope(100.0), 16, positions))
    rotated_channels = [*range(4), *range(8, 12)]
    assert relative_error(actual[..., rotated_channels], full[..., rotated_channels]) < 1e-6


def test_longrope_switches_factors_by_row_length() -> None:
    """The length of a row is known from positions, row lengths, or cu_seqlens."""
    rope = Rope(100.0, scaling=LONGROPE)
    short, long = (Rope(100.0, scaling=replace(LONGROPE, context=context)) for context in (99, 0))
    row = torch.arange(12)[None]

    def check_equal(actual: RopeTables, expected: RopeTables) -> None:
        assert torch.equal(actual.cos, expected.cos) and torch.equal(actual.sin, expected.sin)

    check_equal(rope_tables(rope, 6, row), rope_tables(long, 6, row))
    check_equal(rope_tables(rope, 6, row[:, :8]), rope_tables(short, 6, row[:, :8]))
    check_equal(rope_tables(rope, 6, row, lengths=torch.tensor([8])), rope_tables(short, 6, row))
    check_equal(rope_tables(rope, 6, row, lengths=torch.tensor([9])), rope_tables(long, 6, row))
    check_equal(rope_tables(rope, 6, torch.tensor([[7], [8]])[1:]), rope_tables(long, 6, torch.tensor([[8]])))
    positions = torch.cat([torch.arange(9), torch.arange(3)]).view(2, 6)
    actual = rope_tables(rope, 6, positions, SequenceLayout(torch.tensor([0, 9, 12])))
    for tokens, expected in ((slice(9), long), (slice(9, 12), short)):
        assert torch.equal(
            actual.cos.flatten(0, 1)[tokens], rope_tables(expected, 6, positions).cos.flatten(0, 1)[tokens]
        )
