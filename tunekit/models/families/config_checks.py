"""Checks of the values of a config.json, and of the DecoderSpec read from it, before anything is allocated."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from tunekit.models.spec import (
    MLP,
    Attention,
    DecoderSpec,
    DeltaNet,
    DenseMoE,
    LatentAttention,
    Layer,
    Llama3Scaling,
    Mamba2,
    MoE,
    ParallelMixers,
    Rope,
    YarnScaling,
)

MAX_SIZE, MAX_VOCAB, MAX_LAYERS, MAX_POSITIONS = 2**20, 2**24, 1000, 2**40


class Range(NamedTuple):
    """Allowed values of a number."""

    low: float
    high: float
    is_integer: bool = False
    excludes_low: bool = False

    def __contains__(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.is_integer else (int, float)):
            return False
        return (self.low < value if self.excludes_low else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        kind = "an integer" if self.is_integer else "a number"
        if self.excludes_low:
            return f"{kind} above {self.low:.15g} and at most {self.high:.15g}"
        return f"{kind} from {self.low:.15g} to {self.high:.15g}"


class AllowedType(NamedTuple):
    """Allowed values that are not numbers."""

    description: str
    accepts: Callable[[Any], bool]

    def __contains__(self, value: object) -> bool:
        return self.accepts(value)

    def __str__(self) -> str:
        return self.description


SIZE, SIZE_OR_ZERO = Range(1, MAX_SIZE, True), Range(0, MAX_SIZE, True)
POSITION = Range(0, MAX_POSITIONS, True)
FRACTION = Range(0, 1, excludes_low=True)
POSITIVE, NON_NEGATIVE = Range(0, 1e30, excludes_low=True), Range(0, 1e30)
ROPE_BASE = Range(1, 1e30, excludes_low=True)
FLAG = AllowedType("true or false", lambda value: value in (True, False))
CAUSAL = AllowedType("true: only causal attention is supported", lambda value: value is True)
LIST = AllowedType("a list", lambda value: isinstance(value, list))
FACTORS = AllowedType(
    "a list of positive numbers",
    lambda value: isinstance(value, list) and all(item in POSITIVE for item in value),
)
OBJECT = AllowedType("an object", lambda value: isinstance(value, Mapping))

KEYS_BY_VALUES = {
    Range(1, MAX_VOCAB, True): "vocab_size vocab_size_per_layer_input",
    Range(1, MAX_LAYERS, True): "num_hidden_layers",
    Range(1, MAX_POSITIONS, True): "max_position_embeddings original_max_position_embeddings attention_chunk_size",
    SIZE: (
        "hidden_size intermediate_size intermediate_size_mlp moe_intermediate_size head_dim global_head_dim v_head_dim "
        "qk_rope_head_dim kv_lora_rank q_lora_rank num_attention_heads num_key_value_heads num_global_key_value_heads "
        "linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads linear_conv_kernel_dim "
        "top_k_experts n_group topk_group decoder_sparse_step full_attention_interval "
        "sliding_window_pattern interleave_moe_layer_step no_rope_layer_interval "
        "altup_num_inputs laurel_rank moe_k moe_layer_interval conv_L_cache block_multiple_of block_ff_dim "
        "mamba_n_heads mamba_d_ssm mamba_n_groups mamba_d_state mamba_d_conv mamba_expand mamba_num_heads "
        "mamba_head_dim ssm_state_size n_groups conv_kernel"
    ),
    SIZE_OR_ZERO: (
        "qk_nope_head_dim num_experts num_local_experts n_routed_experts n_shared_experts max_window_layers "
        "shared_expert_intermediate_size first_k_dense_replace hidden_size_per_layer_input num_kv_shared_layers "
        "num_nextn_predict_layers num_mtp_layers moe_num_experts moe_num_shared_experts moe_layer_start_index "
        "num_experts_per_tok shared_intermediate_size moe_shared_expert_intermediate_size"
    ),
    POSITION: "sliding_window",
    FRACTION: "rms_norm_eps layer_norm_eps norm_eps layer_norm_epsilon partial_rotary_factor",
    ROPE_BASE: "rope_theta rope_local_base_freq",
    POSITIVE: (
        "factor low_freq_factor high_freq_factor attention_factor beta_fast beta_slow "
        "query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping attention_multiplier "
        "embedding_multiplier residual_multiplier logits_scaling routed_scaling_factor floor_scale swiglu_limit "
        "swiglu_alpha logit_scale alpha block_ffn_dim_multiplier altup_coef_clip lm_head_multiplier key_multiplier "
        "attention_in_multiplier attention_out_multiplier ssm_in_multiplier ssm_out_multiplier"
    ),
    NON_NEGATIVE: "initializer_range mscale mscale_all_dim attn_scale llama_4_scaling_beta",
    FLAG: (
        "attention_bias attention_out_bias use_bias conv_bias use_conv_bias mamba_conv_bias mamba_proj_bias "
        "projectors_bias mamba_rms_norm mamba_norm_before_gate tie_embedding block_auto_adjust_ff_dim mlp_bias "
        "qkv_bias tie_word_embeddings use_sliding_window use_qk_norm norm_topk_prob rope_interleave truncate "
        "attn_temperature_tuning attention_k_eq_v enable_moe_block altup_correct_scale use_double_wide_mlp"
    ),
    CAUSAL: "is_causal",
    LIST: (
        "layer_types no_rope_layers mlp_only_layers moe_layers cross_attention_layers full_attn_idxs "
        "activation_sparsity_pattern attn_layer_indices mlp_multipliers ssm_multipliers layers_block_type "
        "time_step_limit mamba_dt_limit"
    ),
    FACTORS: "short_factor long_factor",
    OBJECT: "text_config rope_parameters rope_scaling per_layer_config",
}
ALLOWED = {key: allowed for allowed, keys in KEYS_BY_VALUES.items() for key in keys.split()}
FLAGS = {key for key, allowed in ALLOWED.items() if allowed is FLAG}
PER_LAYER = ("intermediate_size",)  # may be a list in Gemma 3n


def check_config_values(config: Mapping[str, Any], prefix: str = "") -> None:
    """Raise ValueError for a known key with a value of the wrong type or outside its range. Null counts as missing."""
    for key, value in config.items():
        allowed, values = ALLOWED.get(key), value if key in PER_LAYER and isinstance(value, list) else [value]
        is_given = value is not None or allowed is CAUSAL  # transformers takes null as false
        if is_given and allowed is not None and any(item not in allowed for item in values):
            raise ValueError(f"{prefix}{key} must be {allowed}, got {shorten(value)}")
        if isinstance(value, Mapping) and (allowed is OBJECT or prefix):
            check_config_values(value, f"{prefix}{key}.")


def shorten(value: object) -> str:
    """A value for an error message, cut to 60 characters."""
    text = f"an integer of {len(str(value))} digits" if isinstance(value, int) and abs(value) >= 1e20 else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_spec(spec: DecoderSpec) -> None:
    """Raise ValueError if the sizes of a layer contradict each other."""
    per_layer = spec.per_layer
    if per_layer is not None and per_layer.unknown_id is None and per_layer.vocab < spec.vocab:
        raise ValueError(f"vocab_size_per_layer_input {per_layer.vocab} is less than vocab_size {spec.vocab}")
    widths = (layer.ffn.intermediate_size for layer in spec.layers if isinstance(layer.ffn, MLP | MoE))
    if (width := next((width for width in widths if not isinstance(width, int)), None)) is not None:
        raise ValueError(f"intermediate_size must be an integer, got {shorten(width)}")
    for layer in dict.fromkeys(spec.layers):
        if problem := next(layer_problems(layer), None):
            raise ValueError(problem)


def layer_problems(layer: Layer) -> Iterator[str]:
    match layer.mixer:
        case Attention() as attention:
            yield from attention_problems(attention)
        case LatentAttention() as attention:
            yield from rope_problems(attention.rope, attention.rope_dim)
        case DeltaNet() as net:
            if net.v_heads % net.k_heads:
                yield f"linear_num_value_heads {net.v_heads} is not a multiple of linear_num_key_heads {net.k_heads}"
        case Mamba2() as mamba:
            yield from mamba_problems(mamba)
        case ParallelMixers(attention, mamba):
            yield from attention_problems(attention)
            yield from mamba_problems(mamba)
    moe = layer.ffn.sparse if isinstance(layer.ffn, DenseMoE) else layer.ffn
    if isinstance(moe, MoE):
        yield from moe_problems(moe)


def attention_problems(attention: Attention) -> Iterator[str]:
    heads, kv_heads = attention.heads, attention.kv_heads
    if heads % kv_heads:
        yield f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
    if attention.rope is not None:
        yield from rope_problems(attention.rope, attention.head_dim)
    if attention.window is not None and attention.window < 1:
        yield f"sliding_window must be at least 1, got {attention.window}"


def mamba_problems(mamba: Mamba2) -> Iterator[str]:
    for key, size in (("heads", mamba.heads), ("channels", mamba.heads * mamba.head_dim)):
        if size % mamba.groups:
            yield f"mamba_n_groups {mamba.groups} (or n_groups) does not divide {size} {key}"


def rope_problems(rope: Rope, head_dim: int) -> Iterator[str]:
    dims = head_dim if rope.dims is None else rope.dims
    if not 2 <= dims <= head_dim or dims % 2:
        yield (
            f"RoPE must rotate an even number of the {head_dim} channels of a head (head_dim, partial_rotary_factor), "
            f"at least 2; got {dims}"
        )
    match rope.scaling:
        case Llama3Scaling(low=low, high=high) if high < low:
            yield f"high_freq_factor {high} must be at least low_freq_factor {low}"
        case YarnScaling(fast=fast, slow=slow) if fast < slow:
            yield f"beta_fast {fast} must be at least beta_slow {slow}"


def moe_problems(moe: MoE) -> Iterator[str]:
    if not 1 <= moe.top_k <= moe.experts:
        yield f"num_experts_per_tok {moe.top_k} must be from 1 to the number of experts, {moe.experts}"
    if moe.groups is not None and (moe.experts % moe.groups[0] or moe.groups[1] > moe.groups[0]):
        yield f"{moe.experts} experts cannot be split into n_group {moe.groups[0]}, with topk_group {moe.groups[1]}"
    elif moe.groups is not None:
        size = moe.experts // moe.groups[0]
        if moe.top_k > (limit := size * moe.groups[1]):
            yield f"num_experts_per_tok {moe.top_k} must be at most {limit}, the number of experts in topk_group groups"
        if moe.selection_bias and size < 2:
            yield f"n_group {moe.groups[0]} must leave at least 2 experts in each group"
