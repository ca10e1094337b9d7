"""Every family against transformers, on random checkpoints of odd shapes: logits, gradients, files, generation."""

from copy import deepcopy

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError

from tests.checkpoints import SHAPES
from tests.parity import measure_parity
from tests.shapes_dense import DENSE
from tunekit.errors import UserError
from tunekit.models.families.registry import find_family
from tunekit.models.spec import DecoderSpec


@pytest.mark.parametrize("name", SHAPES)
def test_family(name: str) -> None:
    found = measure_parity(name)
    assert found.logits < 1e-5
    assert found.gradients < 1e-4
    assert not found.generation
    assert not found.files
    assert not found.config_versions


SIZES = {"model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}


@pytest.mark.parametrize("name", SHAPES)
def test_what_config_leaves_out_is_what_transformers_takes(name: str) -> None:
    """Or, beside what dense families have, an error: nobody guesses how many experts there are."""
    inner = SHAPES[name].get("text_config", SHAPES[name])
    # Defaults are for models of some size: 32 heads, and layers enough for patterns.
    heads = {"num_attention_heads": 32, "hidden_size": 32 * inner["hidden_size"] // inner["num_attention_heads"]}
    count = {} if "layer_types" in inner else {"num_hidden_layers": 30}
    inner = inner | heads | count | {"num_key_value_heads": 2}
    for left_out in (None, *inner.keys() - SIZES):
        told = {key: value for key, value in inner.items() if key != left_out}
        shape = SHAPES[name] | {"text_config": told} if "text_config" in SHAPES[name] else told
        whole = transformers.AutoConfig.for_model(**shape).to_dict()
        try:
            assert spec(shape) == spec(whole), left_out
        except UserError:
            assert name not in DENSE and left_out is not None, left_out


@pytest.mark.parametrize(("name", "key", "spoken"), [
    ("llama2", "num_key_value_heads", 6), ("llama2", "head_dim", 8), 
    ("qwen2", "num_key_value_heads", 5), ("qwen3", "num_key_value_heads", 6),
])  # fmt: skip
def test_null_is_what_transformers_takes_it_for(name: str, key: str, spoken: int) -> None:
    config = transformers.AutoConfig.for_model(**(SHAPES[name] | {key: None}))
    assert config.to_dict()[key] == spoken
    assert spec(SHAPES[name] | {key: None}) == spec(SHAPES[name] | {key: spoken})


@pytest.mark.parametrize("name", ["ministral", "qwen2", "gemma2", "gemma3-scaled", "olmo3", "gpt-oss", "qwen2-moe"])
def test_as_many_kinds_of_layers_as_layers(name: str) -> None:
    """Or a model of another depth would be made, without a word."""
    count = SHAPES[name]["num_hidden_layers"]
    shape = SHAPES[name] | {"layer_types": ["full_attention"] * count}
    assert len(spec(shape).layers) == count
    for other in (count - 1, count + 1):
        with pytest.raises(StrictDataclassError, match="num_hidden_layers"):
            transformers.AutoConfig.for_model(**(shape | {"num_hidden_layers": other}))
        with pytest.raises(UserError, match=f"layer_types speaks of {count} layers, num_hidden_layers of {other}"):
            spec(shape | {"num_hidden_layers": other})
    with pytest.raises(UserError, match="'linear_attention' is not supported, only sliding_attention and full_atte"):
        spec(shape | {"layer_types": ["linear_attention"] * count})


@pytest.mark.parametrize("name", ["smollm3", "llama4"])
def test_no_rope_layers_speak_of_all_layers(name: str) -> None:
    with pytest.raises(UserError, match="no_rope_layers speaks of 1 layers"):
        spec(SHAPES[name] | {"no_rope_layers": [1], "layer_types": None})


@pytest.mark.parametrize("name", ["llama3.2", "qwen3", "gpt-oss-usual", "deepseek-v3-plain", "ministral3"])
@pytest.mark.parametrize("kind", ["rope_type", "type"])
def test_rope_scaling_written_into_a_newer_file_counts(name: str, kind: str) -> None:
    """As model cards say it is done for long rows, where `rope_parameters` say that nothing is stretched."""
    whole = transformers.AutoConfig.for_model(**SHAPES[name]).to_dict()
    stretched = {kind: "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 7e3}
    told = whole | {"rope_scaling": stretched | {"llama_4_scaling_beta": 0.2}}
    assert spec(told) != spec(whole)
    assert spec(told) == spec(transformers.AutoConfig.for_model(**deepcopy(told)).to_dict())


@pytest.mark.parametrize("name", ["gemma3", "olmo3"])
def test_rotation_of_all_layers_is_refused_where_each_kind_has_its_own(name: str) -> None:
    """transformers takes the usual ones for both, and does not say so."""
    with pytest.raises(UserError, match="rope_parameters has no 'full_attention'"):
        spec(SHAPES[name] | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 7e3}})


@pytest.mark.parametrize("name", ["phi3-long", "phi4-mini"])
@pytest.mark.parametrize("key", ["short_factor", "long_factor"])
def test_longrope_has_a_factor_for_every_pair(name: str, key: str) -> None:
    p = SHAPES[name]["rope_parameters"]
    assert spec(SHAPES[name]).layers
    with pytest.raises(UserError, match=f"long_factor need {len(p[key])} numbers each"):
        spec(SHAPES[name] | {"rope_parameters": p | {key: p[key][1:]}})


def spec(config: dict) -> DecoderSpec:
    return find_family(config, "config.json")[1]
