"""Linear layers where weights and inputs are of different dtypes."""

import pytest
import torch

from tests.checkpoints import relative_error
from tunekit.models.linear import Linear


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_a_large_weight_is_cast_in_parts(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is learnt: a whole head in fp32 would be the most that a check ever holds."""
    layer = Linear(24, 101, bias=bias).bfloat16()
    x = torch.randn(2, 3, 24)
    wanted = layer(x)
    for numbers in (7 * 24, 24, 1, 101 * 24):
        monkeypatch.setattr("tunekit.models.linear.CAST_CHUNK_NUMEL", numbers)
        assert relative_error(layer(x), wanted) < 1e-6
