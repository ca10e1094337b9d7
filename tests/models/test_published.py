"""config.json of published checkpoints: read as transformers reads it, tensor by tensor."""

import json
from copy import deepcopy

import pytest
import torch
import transformers

from tests.checkpoints import auto_class
from tests.published import PUBLISHED
from tunekit import assets
from tunekit.models.decoder import TIED, Decoder
from tunekit.models.families.registry import find_family
from tunekit.models.weight_map import load_mappings


@pytest.mark.parametrize("name", PUBLISHED)
def test_config_means_what_it_means_to_transformers(name: str) -> None:
    config, parameters = PUBLISHED[name]
    spec = find_family(config, name)[1]
    whole = transformers.AutoConfig.for_model(**deepcopy(config)).to_dict()
    if config["model_type"] == "mistral3":
        del whole["tie_word_embeddings"]  # transformers takes the head for tied, until it finds one in the files
    assert spec == find_family(whole, name)[1]
    with torch.device("meta"):
        model = Decoder(spec)
    assert sum(p.numel() for p in model.parameters()) == parameters


PRESETS = {name: json.loads((folder / "config.json").read_text()) for name, folder in assets.PRESETS.items()}
CONFIGS = {name: config for name, (config, _) in PUBLISHED.items()}
CONFIGS |= {config["model_type"]: config for config in PRESETS.values()}  # one of each family


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_of_transformers_has_its_place_and_shape(name: str) -> None:
    """Of some layers: the others are alike."""
    config = transformers.AutoConfig.for_model(**deepcopy(CONFIGS[name]))
    text = config.get_text_config()
    text.num_hidden_layers = 7
    if text.to_dict().get("layer_types"):
        text.layer_types = text.layer_types[:7]
    with torch.device("meta"):
        other = auto_class(config.to_dict()).from_config(config)
    theirs = {n: tuple(t.shape) for n, t in other.state_dict().items()}
    found, spec = find_family(config.to_dict(), name)
    with torch.device("meta"):
        shapes = Decoder(spec).shapes
    moves, unknown = load_mappings(theirs, found.table)
    assert not unknown
    read = [move for move in moves if move.ours]
    assert {name for move in read for name in move.ours} | {TIED} == shapes.keys() | {TIED}
    for move in read:
        assert [theirs[n] for n in move.hub] == move.hub_shapes(shapes)
