"""config.json of published checkpoints gives the model and tensors of transformers."""

import json
from copy import deepcopy

import pytest
import torch
import transformers

from tests.helpers.published_configs import PUBLISHED
from tests.helpers.random_checkpoints import auto_class
from tunekit import assets
from tunekit.models.decoder import TIED, Decoder
from tunekit.models.families.registry import find_family
from tunekit.models.weight_map import load_mappings


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_matches_transformers(name: str) -> None:
    config, parameters = PUBLISHED[name]
    spec = find_family(config, name)[1]
    full_config = transformers.AutoConfig.for_model(**deepcopy(config)).to_dict()
    if config["model_type"] == "mistral3":
        del full_config["tie_word_embeddings"]  # transformers assumes a tied head until it finds one in the files
    assert spec == find_family(full_config, name)[1]
    with torch.device("meta"):
        model = Decoder(spec)
    assert sum(p.numel() for p in model.parameters()) == parameters


PRESETS = {name: json.loads((folder / "config.json").read_text()) for name, folder in assets.PRESETS.items()}
CONFIGS = {name: config for name, (config, _) in PUBLISHED.items()}
CONFIGS |= {config["model_type"]: config for config in PRESETS.values()}  # one of each family


@pytest.mark.parametrize("name", CONFIGS)
def test_all_tensors_of_transformers_are_mapped(name: str) -> None:
    """With 7 layers, which include all layer types."""
    config = transformers.AutoConfig.for_model(**deepcopy(CONFIGS[name]))
    text = config.get_text_config()
    text.num_hidden_layers = 7
    if text.to_dict().get("layer_types"):
        text.layer_types = text.layer_types[:7]
    with torch.device("meta"):
        transformers_model = auto_class(config.to_dict()).from_config(config)
    hub_shapes = {n: tuple(t.shape) for n, t in transformers_model.state_dict().items()}
    family, spec = find_family(config.to_dict(), name)
    with torch.device("meta"):
        shapes = Decoder(spec).shapes
    mappings, unknown = load_mappings(hub_shapes, family.table)
    assert not unknown
    loaded = [mapping for mapping in mappings if mapping.ours]
    assert {name for mapping in loaded for name in mapping.ours} | {TIED} == shapes.keys() | {TIED}
    for mapping in loaded:
        assert [hub_shapes[n] for n in mapping.hub] == mapping.hub_shapes(shapes)
