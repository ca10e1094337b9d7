"""Experts that live on different ranks."""

from pathlib import Path

import pytest

from tests.layout.compared import folder
from tunekit import build
from tunekit.adapters.config import LoRAConfig
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.collectives import MeshDim
from tunekit.distributed.expert_parallel import shard_experts
from tunekit.errors import UserError
from tunekit.quantization.config import NF4Config, NoQuantization

REFUSED = [
    ("sparse", 3, NoQuantization(), "3 devices cannot share the 4 experts of layers.0.mlp.experts.gate_proj alike"),
    ("sparse", 2, NF4Config(double_quant=True), "set quantization.double_quant to false"),
    ("dense", 2, NoQuantization(), "this model has no experts"),
]


@pytest.mark.parametrize(("name", "count", "weights", "told"), REFUSED)
def test_what_cannot_be_divided(name: str, count: int, weights: NoQuantization, told: str, tmp_path: Path) -> None:
    model = build.build_meta_model(HFCheckpoint.open(folder(tmp_path, name)), weights, LoRAConfig(4))
    with pytest.raises(UserError, match=told) as refused:
        shard_experts(model, MeshDim(None, count, 0))  # type: ignore[arg-type] (nothing is sent)
    assert str(refused.value).startswith("parallel.ep: ")
