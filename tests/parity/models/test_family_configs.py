"""Config keys of all families, compared with transformers: defaults, null, layer types and RoPE."""

from copy import deepcopy

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError

from tests.helpers.dense_shapes import DENSE
from tests.helpers.random_checkpoints import SHAPES
from tunekit.errors import UserError
from tunekit.models.families.registry import find_family
from tunekit.models.spec import DecoderSpec

REQUIRED_KEYS = {
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
}


@pytest.mark.parametrize("name", SHAPES)
def test_omitted_config_keys_have_the_defaults_of_transformers(name: str) -> None:
    """Omitted keys that only exist for some families, such as the number of experts, are errors."""
    inner = SHAPES[name].get("text_config", SHAPES[name])
    # Defaults are for models of realistic size: 32 heads, and enough layers for a pattern.
    heads = {"num_attention_heads": 32, "hidden_size": 32 * inner["hidden_size"] // inner["num_attention_heads"]}
    count = {} if "layer_types" in inner else {"num_hidden_layers": 30}
    inner = inner | heads | count | {"num_key_value_heads": 2}
    for left_out in (None, *inner.keys() - REQUIRED_KEYS):
        given = {key: value for key, value in inner.items() if key != left_out}
        shape = SHAPES[name] | {"text_config": given} if "text_config" in SHAPES[name] else given
        full_config = transformers.AutoConfig.for_model(**shape).to_dict()
        try:
            assert to_spec(shape) == to_spec(full_config), left_out
        except UserError:
            assert name not in DENSE and left_out is not None, left_out


@pytest.mark.parametrize(("name", "key", "meaning"), [
    ("llama2", "num_key_value_heads", 6), ("llama2", "head_dim", 8), 
    ("qwen2", "num_key_value_heads", 5), ("qwen3", "num_key_value_heads", 6),
])  # fmt: skip
def test_null_has_the_meaning_of_transformers(name: str, key: str, meaning: int) -> None:
    config = transformers.AutoConfig.for_model(**(SHAPES[name] | {key: None}))
    assert config.to_dict()[key] == meaning
    assert to_spec(SHAPES[name] | {key: None}) == to_spec(SHAPES[name] | {key: meaning})


@pytest.mark.parametrize("name", ["ministral", "qwen2", "gemma2", "gemma3-scaled", "olmo3", "gpt-oss", "qwen2-moe"])
def test_layer_types_must_match_the_number_of_layers(name: str) -> None:
    """Otherwise a model of another depth would be built silently."""
    count = SHAPES[name]["num_hidden_layers"]
    shape = SHAPES[name] | {"layer_types": ["full_attention"] * count}
    assert len(to_spec(shape).layers) == count
    for other in (count - 1, count + 1):
        with pytest.raises(StrictDataclassError, match="num_hidden_layers"):
            transformers.AutoConfig.for_model(**(shape | {"num_hidden_layers": other}))
        with pytest.raises(UserError, match=f"layer_types .*{count} .*num_hidden_layers .*{other}"):
            to_spec(shape | {"num_hidden_layers": other})
    with pytest.raises(UserError, match="'linear_attention'"):
        to_spec(shape | {"layer_types": ["linear_attention"] * count})


@pytest.mark.parametrize("name", ["smollm3", "llama4"])
def test_no_rope_layers_must_match_the_number_of_layers(name: str) -> None:
    with pytest.raises(UserError, match="no_rope_layers .*1 "):
        to_spec(SHAPES[name] | {"no_rope_layers": [1], "layer_types": None})


@pytest.mark.parametrize("name", ["llama3.2", "qwen3", "gpt-oss-usual", "deepseek-v3-plain", "ministral3"])
@pytest.mark.parametrize("kind", ["rope_type", "type"])
def test_rope_scaling_overrides_rope_parameters(name: str, kind: str) -> None:
    """Model cards recommend this for long contexts when `rope_parameters` has no scaling."""
    full_config = transformers.AutoConfig.for_model(**SHAPES[name]).to_dict()
    scaling = {kind: "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 7e3}
    scaled_config = full_config | {"rope_scaling": scaling | {"llama_4_scaling_beta": 0.2}}
    assert to_spec(scaled_config) != to_spec(full_config)
    assert to_spec(scaled_config) == to_spec(transformers.AutoConfig.for_model(**deepcopy(scaled_config)).to_dict())


@pytest.mark.parametrize("name", ["gemma3", "olmo3"])
def test_common_rope_is_refused_if_layer_types_have_their_own(name: str) -> None:
    """transformers silently uses defaults for both layer types."""
    with pytest.raises(UserError, match="rope_parameters: .*'full_attention'"):
        to_spec(SHAPES[name] | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 7e3}})


@pytest.mark.parametrize("name", ["phi3-long", "phi4-mini"])
@pytest.mark.parametrize("key", ["short_factor", "long_factor"])
def test_longrope_requires_a_factor_for_each_pair(name: str, key: str) -> None:
    p = SHAPES[name]["rope_parameters"]
    assert to_spec(SHAPES[name]).layers
    with pytest.raises(UserError, match=f"long_factor .*{len(p[key])} "):
        to_spec(SHAPES[name] | {"rope_parameters": p | {key: p[key][1:]}})


def to_spec(config: dict) -> DecoderSpec:
    return find_family(config, "config.json")[1]
