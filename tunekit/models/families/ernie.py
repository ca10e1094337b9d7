"""ERNIE 4.5: Llama with interleaved RoPE; with experts selected by softmax scores and a bias."""

from dataclasses import replace
from typing import Any

from tunekit.models.families.base import (
    LLAMA,
    Config,
    attention_spec,
    decoder_spec,
    mlp_spec,
    reject_config_values,
    rename_keys,
    rope_from_config,
    with_default_config,
)
from tunekit.models.families.moe_base import EXPERTS, HUB, OURS, ROUTER, moe_spec
from tunekit.models.spec import Attention, DecoderSpec, Layer
from tunekit.models.weight_map import KeyRule, MultiTokenPrediction, Unsqueezed

BIAS = "moe_statics.e_score_correction_bias"
MODULES = (KeyRule(f"{OURS}.router.selection_bias", f"{HUB}.gate.{BIAS}", Unsqueezed()),)  # of transformers
MTP_MODULES = ("block", "emb_norm", "hidden_norm", "linear_proj")  # multi-token prediction
MOE_TABLE = (
    *EXPERTS,
    KeyRule(f"{OURS}.router.selection_bias", f"{HUB}.{BIAS}", Unsqueezed()),
    *MODULES,
    KeyRule(f"{OURS}.shared", f"{HUB}.shared_experts"),
    *ROUTER,
    *LLAMA,
    *(KeyRule((), f"model.mtp_{name}", MultiTokenPrediction()) for name in MTP_MODULES),
)
DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5}
DEFAULTS |= {"rope_theta": 5e5, "tie_word_embeddings": True, "use_bias": False}
MOE_DEFAULTS = DEFAULTS | {"num_key_value_heads": 4, "moe_intermediate_size": 1536, "moe_num_experts": 64, "moe_k": 6}
MOE_DEFAULTS |= {"moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1}
MOE_DEFAULTS |= {"moe_layer_interval": 1, "moe_norm_min": 1e-12}
del MOE_DEFAULTS["head_dim"]


def ernie(config: Config) -> DecoderSpec:
    c = with_biases(with_default_config(config, **DEFAULTS))
    return decoder_spec(c, [Layer(attention(c), mlp_spec(c))] * c["num_hidden_layers"])


def with_biases(c: Config) -> dict[str, Any]:
    """The common bias flag as those of attention and MLP."""
    return {**c, "attention_bias": c["use_bias"], "mlp_bias": c["use_bias"]}


def attention(c: Config) -> Attention:
    return attention_spec(c, rope=replace(rope_from_config(c), interleaved=True))


def ernie_moe(config: Config) -> DecoderSpec:
    config = rename_keys(config, {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"})
    c = with_biases(with_default_config(config, **MOE_DEFAULTS))
    reject_config_values(c, {"use_bias": False, "moe_norm_min": 1e-12})
    keys = {"num_experts": c["moe_num_experts"], "num_experts_per_tok": c["moe_k"]}
    shared = c["moe_intermediate_size"] * c["moe_num_shared_experts"]
    fields = {"selection_bias": True, "router_in_fp32": True, "shared_intermediate_size": shared}
    moe = moe_spec({**c, **keys}, c["moe_intermediate_size"], **fields)
    count, last = c["num_hidden_layers"], c["moe_layer_end_index"]
    sparse = range(c["moe_layer_start_index"], (count - 1 if last == -1 else last) + 1)
    ffns = (moe if i in sparse and (i + 1) % c["moe_layer_interval"] == 0 else mlp_spec(c) for i in range(count))
    return decoder_spec(c, (Layer(attention(c), ffn) for ffn in ffns))
