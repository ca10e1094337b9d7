"""Layers that several ranks share, if they can."""

import re
from pathlib import Path

import pytest

from tests.layout.compared import folder
from tunekit import build
from tunekit.adapters.config import LoRAConfig
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.collectives import MeshDim
from tunekit.distributed.tensor_parallel import shard_layers
from tunekit.errors import UserError
from tunekit.quantization.config import NF4Config, NoQuantization

REFUSED = [
    ("dense", {"hidden_size": 96, "num_attention_heads": 6}, 4, NoQuantization(), "layers.1.attn has 6 heads, which 4"),
    (
        "dense",
        {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3},
        2,
        NoQuantization(),
        "has 3 heads of keys, which 2 devices",
    ),
    ("dense", {"intermediate_size": 130}, 4, NoQuantization(), "layers.1.mlp has 130 hidden channels, which 4 devices"),
    (
        "sparse",
        {"moe_intermediate_size": 27},
        2,
        NoQuantization(),
        "layers.1.mlp has 27 hidden channels in an expert, which 2",
    ),
    ("dense", {}, 4, NF4Config(), "down_proj reads 128 channels in blocks of 64, which 4 devices"),
    ("dense", {}, 2, NF4Config(double_quant=True), "set quantization.double_quant to false"),
    ("olmo2", {}, 2, NoQuantization(), "layers.2.attn norms all heads together, and 2 devices would share them"),
]


@pytest.mark.parametrize(("name", "changes", "count", "weights", "told"), REFUSED)
def test_what_cannot_be_divided(
    name: str, changes: dict, count: int, weights: NoQuantization, told: str, tmp_path: Path
) -> None:
    model = build.build_meta_model(HFCheckpoint.open(folder(tmp_path, name, **changes)), weights, LoRAConfig(4))
    with pytest.raises(UserError, match=re.escape(told)) as refused:
        shard_layers(model, MeshDim(None, count, 0), False)  # type: ignore[arg-type] (nothing is sent)
    assert str(refused.value).startswith("parallel.tp: ")
