"""Qwen2, Qwen2.5 and Qwen3, dense."""

from tunekit.models.families.base import Config, attention, complete, decoder, mlp, windows
from tunekit.models.spec import DecoderSpec, Layer, Norm

USUAL = {"max_position_embeddings": 32_768, "max_window_layers": 28, "num_key_value_heads": 32, "sliding_window": 4096}


def qwen2(config: Config) -> DecoderSpec:
    """Biases on q, k and v, whatever config.json says."""
    c = complete(config, **USUAL)
    return decoder(c, (Layer(attention(c, bias=True, out_bias=False, window=w), mlp(c)) for w in windows(c)))


def qwen3(config: Config) -> DecoderSpec:
    """A norm over each head of q and k."""
    c = complete(config, head_dim=128, **USUAL)
    norm = Norm(c["rms_norm_eps"])
    return decoder(c, (Layer(attention(c, qk_norm=norm, window=w), mlp(c)) for w in windows(c)))
