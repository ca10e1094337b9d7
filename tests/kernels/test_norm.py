"""Norm and gated activations against their definitions in float64 and against transformers in bf16."""

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.checkpoints import error
from tunekit.kernels.glu import gated
from tunekit.kernels.norm import rms_norm


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
