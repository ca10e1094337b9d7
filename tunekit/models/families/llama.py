"""Llama 2, 3, 3.1, 3.2 and 3.3, SmolLM2 and every other checkpoint of the same plan."""

from tunekit.models.families.base import Config, attention, complete, decoder, mlp
from tunekit.models.spec import DecoderSpec, Layer


def spec(config: Config) -> DecoderSpec:
    c = complete(config)
    return decoder(c, [Layer(attention(c), mlp(c))] * c["num_hidden_layers"])
