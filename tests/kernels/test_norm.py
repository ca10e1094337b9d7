"""Norm, gated activations and rotation against their definitions in float64 and against transformers in bf16."""

import math

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from tests.checkpoints import error
from tunekit.kernels.glu import gated
from tunekit.kernels.norm import rms_norm
from tunekit.models.rope import rotate, tables
from tunekit.models.spec import Rope


@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
def test_rms_norm(scale: float) -> None:
    x, weight = scale * torch.randn(3, 5, 24), torch.rand(24) + 0.5
    wanted = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert error(rms_norm(x, weight, 1e-5).double(), wanted) < 1e-6


def test_rms_norm_in_bf16_is_that_of_transformers_to_the_bit() -> None:
    x, norm = torch.randn(7, 9, 64).bfloat16(), LlamaRMSNorm(64, 1e-6).bfloat16()
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    found = rms_norm(x, norm.weight, 1e-6)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, norm(x))


@pytest.mark.parametrize(("act", "name"), [("silu", "silu"), ("gelu", "gelu"), ("gelu_tanh", "gelu_pytorch_tanh"),
                                           ("gelu_tanh", "gelu_new")])  # fmt: skip
def test_gates(act: str, name: str) -> None:
    gate, up = 3 * torch.randn(2, 50), torch.randn(2, 50)
    assert error(gated(act, gate, up), ACT2FN[name](gate) * up) < 1e-6


def test_rotation_turns_pairs_by_their_angle() -> None:
    """As complex numbers: the pair (i, i + D/2) at position p turns by p * theta^(-2i/D)."""
    x, positions = torch.randn(2, 40, 3, 12), torch.arange(80).view(2, 40)
    pairs = torch.complex(x[..., :6].double(), x[..., 6:].double())
    angle = positions[..., None, None] * 500.0 ** (-torch.arange(6).double() / 6)
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    found = rotate(x, tables(Rope(500.0), 12, positions))
    assert error(found.double(), torch.cat([turned.real, turned.imag], dim=-1)) < 1e-5


def test_rotation_is_that_of_transformers() -> None:
    x, positions = torch.randn(2, 9, 3, 12), torch.arange(9).expand(2, 9)
    rotation = tables(Rope(100.0), 12, positions)
    cos, sin = (torch.cat([t, t], dim=-1).squeeze(2) for t in (rotation.cos, rotation.sin))
    wanted, _ = apply_rotary_pos_emb(x.transpose(1, 2), x.transpose(1, 2), cos, sin)
    assert error(rotate(x, rotation), wanted.transpose(1, 2)) < 1e-6


def test_rotation_of_a_part_leaves_the_rest() -> None:
    x, positions = torch.randn(2, 9, 3, 12), torch.arange(9).expand(2, 9)
    found = rotate(x, tables(Rope(dims=8), 12, positions))
    assert torch.equal(found[..., 8:], x[..., 8:])
    assert torch.equal(found[..., :8], rotate(x[..., :8], tables(Rope(), 8, positions)))


def test_rotation_keeps_products_of_equal_distance() -> None:
    """What makes it a position: scores depend on the distance alone, also far from the beginning."""
    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)

    def score(at: int, to: int) -> float:
        turned = [rotate(x, tables(Rope(), 16, torch.tensor([[p]]))) for x, p in ((q, at), (k, to))]
        return (turned[0] * turned[1]).sum().item()

    assert math.isclose(score(7, 3), score(1007, 1003), rel_tol=1e-3, abs_tol=1e-3)
    assert not math.isclose(score(7, 3), score(7, 2), rel_tol=1e-2)
