"""SmolLM3: Llama without positions in every fourth layer."""

from dataclasses import replace

from tunekit.models.families.base import Config, attention, complete, decoder, mlp, turned
from tunekit.models.spec import DecoderSpec, Layer

USUAL = {"num_key_value_heads": 4, "rope_theta": 2e6, "max_position_embeddings": 32_768, "no_rope_layer_interval": 4}
USUAL |= {"tie_word_embeddings": True}


def spec(config: Config) -> DecoderSpec:
    c = complete(config, **USUAL)
    near = attention(c)
    far = replace(near, rope=None, window=c.get("sliding_window") if c.get("use_sliding_window") else None)
    return decoder(c, (Layer(near if turns else far, mlp(c)) for turns in turned(c)))
