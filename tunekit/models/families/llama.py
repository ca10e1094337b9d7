"""Llama 2 and 3.x, SmolLM2, and all checkpoints with the same architecture."""

from tunekit.models.families.base import Config, attention_spec, decoder_spec, mlp_spec, with_default_config
from tunekit.models.spec import DecoderSpec, Layer


def spec(config: Config) -> DecoderSpec:
    c = with_default_config(config)
    return decoder_spec(c, [Layer(attention_spec(c), mlp_spec(c))] * c["num_hidden_layers"])
