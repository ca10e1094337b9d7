"""Mixtral: Mistral with experts."""

from tunekit.models.families.base import LLAMA, Config, attention_spec, decoder_spec, with_default_config
from tunekit.models.families.moe import EXPERTS, OURS, ROUTER, expert_table, moe_spec
from tunekit.models.spec import DecoderSpec, Layer
from tunekit.models.weight_map import KeyRule

LEGACY_HUB = "model.layers.{}.block_sparse_moe"  # names in all published checkpoints
TABLE = (
    KeyRule(f"{OURS}.router", f"{LEGACY_HUB}.gate"),
    *expert_table(f"{OURS}.experts", f"{LEGACY_HUB}.experts", ("w1", "w3", "w2")),
    *ROUTER,
    *EXPERTS,
    *LLAMA,
)
DEFAULTS = {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6}


def spec(config: Config) -> DecoderSpec:
    c = with_default_config(config, **DEFAULTS)
    layer = Layer(attention_spec(c, window=c.get("sliding_window")), moe_spec(c, c["intermediate_size"]))
    return decoder_spec(c, [layer] * c["num_hidden_layers"])
