"""Rotary positions against complex numbers and against transformers."""

import math
from dataclasses import replace

import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as apply_to_pairs
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests.checkpoints import relative_error
from tunekit.kernels.rope import RopeTables
from tunekit.kernels.rope import apply_rope as rotate_both
from tunekit.kernels.sequence_layout import SequenceLayout
from tunekit.models.rope import rope_tables
from tunekit.models.spec import LongRopeScaling, Rope

LONG = LongRopeScaling(short=(1.0, 1.2, 1.5), long=(2.0, 3.0, 5.0), context=8, amplitude=1.3)


def rotate(x: torch.Tensor, rotation: RopeTables) -> torch.Tensor:
    """Keys are turned as queries are; here are none."""
    return rotate_both(x, x[:, :, :0], rotation)[0]


def test_rotation_turns_pairs_by_their_angle() -> None:
    """As complex numbers: the pair (i, i + D/2) at position p turns by p * theta^(-2i/D)."""
    x, positions = torch.randn(2, 40, 3, 12), torch.arange(80).view(2, 40)
    pairs = torch.complex(x[..., :6].double(), x[..., 6:].double())
    angle = positions[..., None, None] * 500.0 ** (-torch.arange(6).double() / 6)
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    found = rotate(x, rope_tables(Rope(500.0), 12, positions))
    assert relative_error(found.double(), torch.cat([turned.real, turned.imag], dim=-1)) < 1e-5


def test_rotation_is_that_of_transformers() -> None:
    x, positions = torch.randn(2, 9, 3, 12), torch.arange(9).expand(2, 9)
    rotation = rope_tables(Rope(100.0), 12, positions)
    wanted, _ = apply_rotary_pos_emb(x.transpose(1, 2), x.transpose(1, 2), *doubled(rotation))
    assert relative_error(rotate(x, rotation), wanted.transpose(1, 2)) < 1e-6


def test_rotation_of_a_part_leaves_the_rest() -> None:
    x, positions = torch.randn(2, 9, 3, 12), torch.arange(9).expand(2, 9)
    found = rotate(x, rope_tables(Rope(dims=8), 12, positions))
    assert torch.equal(found[..., 8:], x[..., 8:])
    assert torch.equal(found[..., :8], rotate(x[..., :8], rope_tables(Rope(), 8, positions)))


def test_rotation_keeps_products_of_equal_distance() -> None:
    """What makes it a position: scores depend on the distance alone, also far from the beginning."""
    q, k = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(0))

    def score(at: int, to: int) -> float:
        turned = [rotate(x, rope_tables(Rope(), 16, torch.tensor([[p]]))) for x, p in ((q, at), (k, to))]
        return (turned[0] * turned[1]).sum().item()

    assert math.isclose(score(7, 3), score(1007, 1003), rel_tol=1e-3, abs_tol=1e-3)
    assert not math.isclose(score(7, 3), score(7, 2), rel_tol=1e-2)


def doubled(rotation: RopeTables) -> list[torch.Tensor]:
    """Tables as transformers makes them: every angle twice."""
    return [torch.cat([t, t], dim=-1).squeeze(2) for t in (rotation.cos, rotation.sin)]


def test_rotation_of_neighbours_is_that_of_transformers() -> None:
    """They stay neighbours in GLM; in DeepSeek they come out as halves."""
    x, positions = torch.randn(2, 9, 3, 12), torch.arange(9).expand(2, 9)
    rope = Rope(100.0, dims=8, interleaved=True)
    rotation = rope_tables(rope, 12, positions)
    wanted, _ = apply_to_pairs(x.transpose(1, 2), x.transpose(1, 2), *doubled(rotation))
    assert relative_error(rotate(x, rotation), wanted.transpose(1, 2)) < 1e-6
    x = x[..., :8]
    rotation = rope_tables(replace(rope, interleaved_output=False), 8, positions)
    wanted, _ = apply_rotary_pos_emb_interleave(x.transpose(1, 2), x.transpose(1, 2), *doubled(rotation))
    assert relative_error(rotate(x, rotation), wanted.transpose(1, 2)) < 1e-6


def test_padded_frequencies_turn_the_first_channels_of_each_half() -> None:
    x, positions = torch.randn(2, 9, 3, 16), torch.arange(9).expand(2, 9)
    found = rotate(x, rope_tables(Rope(100.0, dims=8, pad=True), 16, positions))
    still = [*range(4, 8), *range(12, 16)]
    assert torch.equal(found[..., still], x[..., still])
    # As if the whole head turned, where it turns.
    whole = rotate(x, rope_tables(Rope(100.0), 16, positions))
    turning = [*range(4), *range(8, 12)]
    assert relative_error(found[..., turning], whole[..., turning]) < 1e-6


def test_long_rows_turn_otherwise_from_their_beginning() -> None:
    """A row knows its length from its positions, from what pads it, or from the bounds of packed documents."""
    rope = Rope(100.0, scaling=LONG)
    short, long = (Rope(100.0, scaling=replace(LONG, context=context)) for context in (99, 0))
    row = torch.arange(12)[None]

    def same(found: RopeTables, wanted: RopeTables) -> None:
        assert torch.equal(found.cos, wanted.cos) and torch.equal(found.sin, wanted.sin)

    same(rope_tables(rope, 6, row), rope_tables(long, 6, row))
    same(rope_tables(rope, 6, row[:, :8]), rope_tables(short, 6, row[:, :8]))
    same(rope_tables(rope, 6, row, lengths=torch.tensor([8])), rope_tables(short, 6, row))
    same(rope_tables(rope, 6, row, lengths=torch.tensor([9])), rope_tables(long, 6, row))
    same(rope_tables(rope, 6, torch.tensor([[7], [8]])[1:]), rope_tables(long, 6, torch.tensor([[8]])))
    positions = torch.cat([torch.arange(9), torch.arange(3)]).view(2, 6)
    found = rope_tables(rope, 6, positions, SequenceLayout(torch.tensor([0, 9, 12])))
    for part, wanted in ((slice(9), long), (slice(9, 12), short)):
        assert torch.equal(found.cos.flatten(0, 1)[part], rope_tables(wanted, 6, positions).cos.flatten(0, 1)[part])
