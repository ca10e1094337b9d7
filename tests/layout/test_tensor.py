"""Layers that several ranks share, if they can."""

import re
from pathlib import Path

import pytest

from tests.layout.compared import folder
from tunekit import assemble
from tunekit.adapters import LoRA
from tunekit.checkpoint.folder import Folder
from tunekit.errors import UserError
from tunekit.formats import NF4, Plain
from tunekit.layout.tensor import share
from tunekit.parallel.exchange import Team

REFUSED = [
    ("dense", {"hidden_size": 96, "num_attention_heads": 6}, 4, Plain(), "layers.1.attn has 6 heads, which 4"),
    (
        "dense",
        {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3},
        2,
        Plain(),
        "has 3 heads of keys, which 2 devices",
    ),
    ("dense", {"intermediate_size": 130}, 4, Plain(), "layers.1.mlp has 130 hidden channels, which 4 devices"),
    ("sparse", {"moe_intermediate_size": 27}, 2, Plain(), "layers.1.mlp has 27 hidden channels in an expert, which 2"),
    ("dense", {}, 4, NF4(), "down_proj reads 128 channels in blocks of 64, which 4 devices"),
    ("dense", {}, 2, NF4(nested=True), "set weights.nested to false"),
    ("olmo2", {}, 2, Plain(), "layers.2.attn norms all heads together, and 2 devices would share them"),
]


@pytest.mark.parametrize(("name", "changes", "count", "weights", "told"), REFUSED)
def test_what_cannot_be_divided(
    name: str, changes: dict, count: int, weights: Plain, told: str, tmp_path: Path
) -> None:
    model = assemble.outline(Folder.open(folder(tmp_path, name, **changes)), weights, LoRA(4))
    with pytest.raises(UserError, match=re.escape(told)) as refused:
        share(model, Team(None, count, 0), False)  # type: ignore[arg-type] (nothing is sent)
    assert str(refused.value).startswith("parallel.tensor: ")
