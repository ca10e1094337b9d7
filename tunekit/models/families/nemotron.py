"""Nemotron-H and Nemotron 3: layers of Mamba 2, attention without RoPE, or feed-forward layers with squared ReLU."""

from tunekit.models.families.base import (
    FULL,
    Config,
    attention_spec,
    decoder_spec,
    reject_config_values,
    rename_keys,
    with_default_config,
)
from tunekit.models.families.deepseek import expert_groups
from tunekit.models.families.mamba_base import LEAVES, LINEAR, check_time_steps, hybrid_layer_types
from tunekit.models.spec import MLP, DecoderSpec, Layer, Mamba2, MoE, Norm
from tunekit.models.weight_map import KeyRule, MultiTokenPrediction, Stack, with_prefix

DENSE, SPARSE = "mlp", "moe"  # layer types in config.json
PATTERN = {"M": LINEAR, "*": FULL, "-": DENSE, "E": SPARSE}
LAYER, HUB = "layers.{}", "model.layers.{}"
MIXER = f"{HUB}.mixer"
MLP_LEAVES = ("up_proj", "down_proj")
NAMES = (
    *(KeyRule(f"{LAYER}.attn.{leaf}", f"{MIXER}.{leaf}") for leaf in (*LEAVES, "q_proj", "k_proj", "v_proj", "o_proj")),
    *(KeyRule(f"{LAYER}.mlp.experts.{leaf}", f"{MIXER}.experts.*.{leaf}", Stack()) for leaf in MLP_LEAVES),
    *(KeyRule(f"{LAYER}.mlp.experts.{leaf}.weight", f"{MIXER}.experts.{leaf}") for leaf in MLP_LEAVES),
    KeyRule(f"{LAYER}.mlp.router.selection_bias", f"{MIXER}.gate.e_score_correction_bias"),
    KeyRule(f"{LAYER}.mlp.router", f"{MIXER}.gate"),
    KeyRule(f"{LAYER}.mlp.shared", f"{MIXER}.shared_experts"),
    *(KeyRule(f"{LAYER}.mlp.{leaf}", f"{MIXER}.{leaf}") for leaf in MLP_LEAVES),
    KeyRule(f"{LAYER}.attn_norm", f"{HUB}.norm"),
    KeyRule("embed", "model.embeddings"),
    KeyRule("norm", "model.norm_f"),
    KeyRule("head", "lm_head"),
)
# Published files have another prefix than the modules of transformers. Layers for multi-token prediction are kept.
TABLE = (*with_prefix("backbone.", NAMES), *NAMES, KeyRule((), "mtp", MultiTokenPrediction()))
DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096, "layer_norm_epsilon": 1e-5}
DEFAULTS |= {"ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4}
DEFAULTS |= {"use_conv_bias": True, "use_bias": False, "intermediate_size": 21_504, "mlp_bias": False}
DEFAULTS |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688, "n_group": 1}
DEFAULTS |= {"moe_shared_expert_intermediate_size": 7688, "topk_group": 1, "norm_topk_prob": True}
DEFAULTS |= {"routed_scaling_factor": 1.0, "partial_rotary_factor": 1.0}
OLD_NAMES = {"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias"}
OLD_NAMES |= {"mamba_dt_limit": "time_step_limit", "layer_types": "layers_block_type"}
OLD_NAMES |= {"num_local_experts": "n_routed_experts"}
FIXED = {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "attention_bias": False, "moe_latent_size": None}
FIXED |= {"sliding_window": None, "residual_in_fp32": False}


def spec(config: Config) -> DecoderSpec:
    """transformers 5.23 raises step sizes to `time_step_min` in training and prefill, but not in decoding. The
    published code does not, and neither do we (github.com/huggingface/transformers/pull/48989)."""
    c = with_default_config(rename_keys(config, OLD_NAMES), **DEFAULTS)
    reject_config_values(c, FIXED)
    check_time_steps(c)
    types, norm = layer_types(c), Norm(c["layer_norm_epsilon"], scale_in_fp32=True)
    if SPARSE in types:
        reject_config_values(c, {"mlp_bias": False})
        if not c["moe_shared_expert_intermediate_size"]:
            raise ValueError("moe_shared_expert_intermediate_size must be at least 1")
    # The only norm of a layer is called attn_norm, whatever the layer is.
    layers = {
        LINEAR: Layer(mamba(c), None),
        FULL: Layer(attention_spec(c, rope=None), None),
        DENSE: Layer(None, MLP(c["intermediate_size"], "relu", bool(c["mlp_bias"]), gated=False), parallel=True),
        SPARSE: Layer(None, moe(c), parallel=True),
    }
    return decoder_spec(c, (layers[kind] for kind in types), norm=norm)


def layer_types(c: Config) -> list[str]:
    """Types of all layers, which may be given as a string with a letter per layer."""
    key = "layers_block_type" if c.get("layers_block_type") else "hybrid_override_pattern"
    if key not in c:
        raise ValueError("layers_block_type (or hybrid_override_pattern) is missing")
    types = hybrid_layer_types([PATTERN.get(str(kind), str(kind)) for kind in c[key]])
    if unsupported := [kind for kind in types if kind not in PATTERN.values()]:
        raise ValueError(f"{key}: {unsupported[0]!r} is not supported, only {', '.join(PATTERN.values())}")
    return types


def mamba(c: Config) -> Mamba2:
    sizes = c["mamba_num_heads"], c["mamba_head_dim"], c["n_groups"], c["ssm_state_size"], c["conv_kernel"]
    biases = bool(c["use_conv_bias"]), bool(c["use_bias"]), bool(c["use_bias"])
    return Mamba2(*sizes, *biases, norm=Norm(c["layer_norm_epsilon"]), adaptable_out_proj=False)


def moe(c: Config) -> MoE:
    """Experts as in DeepSeek V3, without gates."""
    return MoE(
        c["n_routed_experts"],
        c["num_experts_per_tok"],
        c["moe_intermediate_size"],
        act="relu",
        scoring_func="sigmoid",
        norm_topk_prob=bool(c["norm_topk_prob"]),
        scale=c["routed_scaling_factor"],
        groups=expert_groups(c),
        selection_bias=True,
        router_in_fp32=True,
        gated=False,
        shared_intermediate_size=c["moe_shared_expert_intermediate_size"],
    )
