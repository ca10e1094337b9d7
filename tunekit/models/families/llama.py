"""Llama 2, 3, 3.1, 3.2 and 3.3, SmolLM2 and every other checkpoint of the same plan; Mistral."""

from tunekit.models.families.base import Config, attention, complete, decoder, mlp
from tunekit.models.spec import DecoderSpec, Layer


def spec(config: Config) -> DecoderSpec:
    c = complete(config)
    return decoder(c, [Layer(attention(c), mlp(c))] * c["num_hidden_layers"])


def mistral(config: Config) -> DecoderSpec:
    """Mistral's first version looks back over a window; later ones set it to null."""
    c = complete(config, num_key_value_heads=8, sliding_window=4096, max_position_embeddings=131_072)
    return decoder(c, [Layer(attention(c, window=c["sliding_window"]), mlp(c))] * c["num_hidden_layers"])
