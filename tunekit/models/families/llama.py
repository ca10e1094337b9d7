"""Llama 2, 3, 3.1, 3.2 and 3.3, SmolLM2 and every other checkpoint of the same plan."""

from tunekit.models.families.base import Config, attention_spec, decoder_spec, mlp_spec, with_default_config
from tunekit.models.spec import DecoderSpec, Layer


def spec(config: Config) -> DecoderSpec:
    c = with_default_config(config)
    return decoder_spec(c, [Layer(attention_spec(c), mlp_spec(c))] * c["num_hidden_layers"])
