"""Linear layers whose weights and inputs have different dtypes."""

import pytest
import torch

from tests.helpers.random_checkpoints import relative_error
from tunekit.models.linear import Linear


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_large_frozen_weight_is_cast_in_chunks(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only without gradients: an fp32 copy of a whole LM head would dominate peak memory."""
    layer = Linear(24, 101, bias=bias).bfloat16()
    x = torch.randn(2, 3, 24)
    expected = layer(x)
    for chunk_numel in (7 * 24, 24, 1, 101 * 24):
        monkeypatch.setattr("tunekit.models.linear.CAST_CHUNK_NUMEL", chunk_numel)
        assert relative_error(layer(x), expected) < 1e-6
