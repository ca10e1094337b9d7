"""Experts on different ranks."""

from pathlib import Path

import pytest

from tests.helpers.compare_layouts import make_checkpoint_dir
from tunekit import build
from tunekit.adapters.config import LoRAConfig
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.collectives import MeshDim
from tunekit.distributed.expert_parallel import shard_experts
from tunekit.errors import UserError
from tunekit.quantization.config import NF4Config, NoQuantization

INVALID = [
    ("sparse", 3, NoQuantization(), "experts"),
    ("sparse", 2, NF4Config(double_quant=True), "quantization.double_quant"),
    ("dense", 2, NoQuantization(), "experts"),
]


@pytest.mark.parametrize(("name", "count", "weights", "message"), INVALID)
def test_indivisible_experts_are_an_error(
    name: str, count: int, weights: NoQuantization, message: str, tmp_path: Path
) -> None:
    model = build.build_meta_model(HFCheckpoint.open(make_checkpoint_dir(tmp_path, name)), weights, LoRAConfig(4))
    with pytest.raises(UserError, match=message) as error:
        shard_experts(model, MeshDim(None, count, 0))  # type: ignore[arg-type] (nothing is sent)
    assert str(error.value).startswith("parallel.ep: ")
