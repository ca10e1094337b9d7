"""Tensor parallel sharding of layers."""

import re
from pathlib import Path

import pytest

from tests.helpers.compare_layouts import make_checkpoint_dir
from tunekit import build
from tunekit.adapters.config import LoRAConfig
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.collectives import MeshDim
from tunekit.distributed.tensor_parallel import shard_layers
from tunekit.errors import UserError
from tunekit.quantization.config import NF4Config, NoQuantization

INVALID = [
    ("dense", {"hidden_size": 96, "num_attention_heads": 6}, 4, NoQuantization(), "layers.1.attn"),
    (
        "dense",
        {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3},
        2,
        NoQuantization(),
        "layers.1.attn",
    ),
    ("dense", {"intermediate_size": 130}, 4, NoQuantization(), "layers.1.mlp"),
    (
        "sparse",
        {"moe_intermediate_size": 27},
        2,
        NoQuantization(),
        "layers.1.mlp",
    ),
    ("dense", {}, 4, NF4Config(), "down_proj"),
    ("dense", {}, 2, NF4Config(double_quant=True), "quantization.double_quant"),
    ("olmo2", {}, 2, NoQuantization(), "layers.2.attn"),
]


@pytest.mark.parametrize(("name", "changes", "count", "weights", "message"), INVALID)
def test_indivisible_layers_are_an_error(
    name: str, changes: dict, count: int, weights: NoQuantization, message: str, tmp_path: Path
) -> None:
    model = build.build_meta_model(
        HFCheckpoint.open(make_checkpoint_dir(tmp_path, name, **changes)), weights, LoRAConfig(4)
    )
    with pytest.raises(UserError, match=re.escape(message)) as error:
        shard_layers(model, MeshDim(None, count, 0), False)  # type: ignore[arg-type] (nothing is sent)
    assert str(error.value).startswith("parallel.tp: ")
