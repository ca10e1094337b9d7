"""Experts that live on different ranks."""

from pathlib import Path

import pytest

from tests.layout.compared import folder
from tunekit import assemble
from tunekit.adapters import LoRA
from tunekit.checkpoint.folder import Folder
from tunekit.errors import UserError
from tunekit.formats import NF4, Plain
from tunekit.layout.expert import share
from tunekit.parallel.exchange import Team

REFUSED = [
    ("sparse", 3, Plain(), "3 devices cannot share the 4 experts of layers.0.mlp.experts.gate_proj alike"),
    ("sparse", 2, NF4(nested=True), "set weights.nested to false"),
    ("dense", 2, Plain(), "this model has no experts"),
]


@pytest.mark.parametrize(("name", "count", "weights", "told"), REFUSED)
def test_what_cannot_be_divided(name: str, count: int, weights: Plain, told: str, tmp_path: Path) -> None:
    model = assemble.outline(Folder.open(folder(tmp_path, name)), weights, LoRA(4))
    with pytest.raises(UserError, match=told) as refused:
        share(model, Team(None, count, 0))  # type: ignore[arg-type] (nothing is sent)
    assert str(refused.value).startswith("parallel.expert: ")
