"""LFM2: gated short convolutions, with attention in some layers."""

from tunekit.models.families.base import (
    FULL,
    Config,
    attention_spec,
    decoder_spec,
    layer_types,
    reject_config_values,
    with_default_config,
)
from tunekit.models.spec import MLP, DecoderSpec, Layer, Norm, ShortConv
from tunekit.models.weight_map import KeyRule

CONV = "conv"  # layer type of a convolution in config.json
LAYER, HUB = "layers.{}", "model.layers.{}"
NAMES = {"mlp.gate_proj": "w1", "mlp.up_proj": "w3", "mlp.down_proj": "w2"}
ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "out_proj"}
ATTENTION |= {"q_norm": "q_layernorm", "k_norm": "k_layernorm"}
TABLE = (
    KeyRule("embed", "model.embed_tokens"),
    KeyRule("norm", "model.embedding_norm"),
    KeyRule("head", "lm_head"),
    *(KeyRule(f"{LAYER}.attn.{ours}", f"{HUB}.self_attn.{name}") for ours, name in ATTENTION.items()),
    *(KeyRule(f"{LAYER}.attn.{name}", f"{HUB}.conv.{name}") for name in ("in_proj", "conv", "out_proj")),
    *(KeyRule(f"{LAYER}.{ours}", f"{HUB}.feed_forward.{name}") for ours, name in NAMES.items()),
    KeyRule(f"{LAYER}.attn_norm", f"{HUB}.operator_norm"),
    KeyRule(f"{LAYER}.mlp_norm", f"{HUB}.ffn_norm"),
)
DEFAULTS = {"num_key_value_heads": 8, "norm_eps": 1e-5, "max_position_embeddings": 128_000, "rope_theta": 1e6}
DEFAULTS |= {"tie_word_embeddings": True, "conv_bias": False, "conv_L_cache": 3, "block_multiple_of": 256}
DEFAULTS |= {"block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True}


def spec(config: Config) -> DecoderSpec:
    c = with_default_config(config, **DEFAULTS)
    c |= {"tie_word_embeddings": config.get("tie_embedding", c["tie_word_embeddings"])}
    reject_config_values(c, {"hidden_act": "silu", "attention_bias": False})
    norm, count = Norm(c["norm_eps"]), c["num_hidden_layers"]
    indices = c.get("full_attn_idxs", range(count))
    types = layer_types(c, [FULL if i in indices else CONV for i in range(count)], CONV)
    mixers = {FULL: attention_spec(c, qk_norm=norm), CONV: ShortConv(c["conv_L_cache"], bool(c["conv_bias"]))}
    ffn = MLP(intermediate_size(c))
    return decoder_spec(c, (Layer(mixers[kind], ffn) for kind in types), norm=norm)


def intermediate_size(c: Config) -> int:
    """Width of the feed-forward layers: two thirds of the stated one, scaled, and rounded up to a multiple."""
    width = c.get("block_ff_dim") or c["intermediate_size"]
    if not c["block_auto_adjust_ff_dim"]:
        return width
    multiple = c["block_multiple_of"]
    return -(-int(c["block_ffn_dim_multiplier"] * int(2 * width / 3)) // multiple) * multiple
