"""Every family against transformers, on random checkpoints of odd shapes: logits, gradients, files, generation."""

import pytest
import transformers

from tests.checkpoints import SHAPES
from tests.parity import figures
from tunekit.models.families.registry import family
from tunekit.models.spec import DecoderSpec


@pytest.mark.parametrize("name", SHAPES)
def test_family(name: str) -> None:
    found = figures(name)
    assert found.logits < 1e-5
    assert found.gradients < 1e-4
    assert not found.generation
    assert not found.files
    assert not found.spelling


# What config.json may leave out, beside the sizes that every file states.
OPTIONAL = {
    "llama2": ("rope_parameters", "head_dim", "num_key_value_heads", "hidden_act", "rms_norm_eps", "attention_bias",
               "mlp_bias", "tie_word_embeddings", "initializer_range", "max_position_embeddings"),
    "mistral": ("rope_parameters", "head_dim", "sliding_window", "num_key_value_heads", "max_position_embeddings"),
    "qwen2-sliding": ("rope_parameters", "sliding_window", "max_window_layers", "layer_types", "num_key_value_heads"),
    "qwen3": ("rope_parameters", "head_dim", "attention_bias", "use_sliding_window", "max_position_embeddings"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in OPTIONAL.items() for key in keys])
def test_what_config_leaves_out_is_what_transformers_takes(name: str, key: str) -> None:
    sizes = {"num_attention_heads": 32, "num_key_value_heads": 2, "hidden_size": 64, "num_hidden_layers": 30}
    shape = {k: value for k, value in (SHAPES[name] | sizes).items() if k != key}
    whole = transformers.AutoConfig.for_model(**shape).to_dict()
    assert spec(shape) == spec(whole)


@pytest.mark.parametrize(("name", "key", "spoken"), [
    ("llama2", "num_key_value_heads", 6), ("llama2", "head_dim", 8), 
    ("qwen2", "num_key_value_heads", 5), ("qwen3", "num_key_value_heads", 6),
])  # fmt: skip
def test_null_is_what_transformers_takes_it_for(name: str, key: str, spoken: int) -> None:
    config = transformers.AutoConfig.for_model(**(SHAPES[name] | {key: None}))
    assert config.to_dict()[key] == spoken
    assert spec(SHAPES[name] | {key: None}) == spec(SHAPES[name] | {key: spoken})


def spec(config: dict) -> DecoderSpec:
    return family(config, "config.json")[1]
