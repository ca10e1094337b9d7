"""Llama architecture and readers of config.json, which most families use with small changes."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tunekit.models.families.config_checks import FLAGS
from tunekit.models.spec import (
    MLP,
    Act,
    Attention,
    DecoderSpec,
    Layer,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Norm,
    Rope,
    Scaling,
    YarnScaling,
)
from tunekit.models.weight_map import Fused, HubOnly, KeyRule, with_prefix

Config = Mapping[str, Any]

LLAMA = (
    KeyRule("embed", "model.embed_tokens"),
    KeyRule("norm", "model.norm"),
    KeyRule("head", "lm_head"),
    KeyRule("layers.{}.attn", "model.layers.{}.self_attn"),
    KeyRule("layers.{}.mlp", "model.layers.{}.mlp"),
    KeyRule("layers.{}.attn_norm", "model.layers.{}.input_layernorm"),
    KeyRule("layers.{}.mlp_norm", "model.layers.{}.post_attention_layernorm"),
)
# Norms before and after each sublayer, as in Gemma 2 and later.
SANDWICH = (
    KeyRule("layers.{}.attn_post_norm", "model.layers.{}.post_attention_layernorm"),
    KeyRule("layers.{}.mlp_norm", "model.layers.{}.pre_feedforward_layernorm"),
    KeyRule("layers.{}.mlp_post_norm", "model.layers.{}.post_feedforward_layernorm"),
)
FUSED_MLP = KeyRule(("layers.{}.mlp.gate_proj", "layers.{}.mlp.up_proj"), "model.layers.{}.mlp.gate_up_proj", Fused())

SLIDING, FULL = "sliding_attention", "full_attention"  # values of `layer_types` in config.json
# Defaults of keys that config.json may omit, as in transformers.
OPTIONAL = {
    "attention_bias": False,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
# Null is a value for these keys and means false for flags; for all others it means that the key is missing.
NULLABLE = {"num_key_value_heads", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "q_lora_rank"}
NULLABLE |= {"mamba_d_ssm", "head_dim"}
# "gelu_new" and "gelu_pytorch_tanh" are the same function.
ACTS: dict[str, Act] = {"silu": "silu", "swish": "silu", "gelu": "gelu"}
ACTS |= {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


def with_default_config(c: Config, **defaults: Any) -> dict[str, Any]:
    """config.json with defaults for missing and null keys.

    Raises ValueError for a partial rotary factor in a family without a default for it, in which transformers rotates
    all channels.
    """
    if "partial_rotary_factor" not in defaults:
        for section in (c, *rope_sections(c)):
            reject_config_values(section, {"partial_rotary_factor": 1.0})
    flags = {key: False for key, value in c.items() if value is None and key in FLAGS}
    given = {key: value for key, value in c.items() if value is not None or key in NULLABLE}
    return OPTIONAL | defaults | flags | given


def rope_sections(c: Config) -> Iterator[Config]:
    """RoPE settings of all layers, or those of each layer type."""
    for section in (c.get("rope_parameters"), c.get("rope_scaling")):
        if section:
            nested = [value for value in section.values() if isinstance(value, Mapping)]
            yield from nested or [section]


def rename_keys(c: Config, names: Mapping[str, str]) -> Config:
    """config.json with the current `names` of old ones, which win over them, as in transformers."""
    renamed = {names[key]: value for key, value in c.items() if key in names}
    return {key: value for key, value in c.items() if key not in names} | renamed


def reject_config_values(c: Config, expected: Config) -> None:
    """Raise ValueError if a key has a value other than the one that is implemented."""
    for key, value in expected.items():
        if c.get(key, value) != value:
            raise ValueError(f"{key} {c[key]!r} is not supported, only {value!r}")


def rope_from_config(c: Config) -> Rope:
    """RoPE settings from `rope_parameters`, or from `rope_theta` and `rope_scaling`."""
    p = {"rope_theta": c["rope_theta"]} | rope_scaling_config(c)
    rotary_fraction = p.get("partial_rotary_factor") or c.get("partial_rotary_factor") or 1.0
    dims, rope_scaling = int(head_dim(c) * rotary_fraction), scaling(p, c)
    if isinstance(rope_scaling, LongRopeScaling) and {len(rope_scaling.short), len(rope_scaling.long)} != {dims // 2}:
        raise ValueError(f"short_factor and long_factor must have {dims // 2} values each, one per channel pair")
    return Rope(float(p["rope_theta"]), None if rotary_fraction == 1.0 else dims, rope_scaling)


def rope_scaling_config(c: Config) -> dict[str, Any]:
    """`rope_scaling`, or else `rope_parameters`. If a file has both, `rope_scaling` was added by hand and wins, but the
    keys of `rope_parameters` that are not about scaling are kept."""
    parameters, legacy = c.get("rope_parameters") or {}, c.get("rope_scaling")
    others = {key: parameters[key] for key in ("rope_theta", "partial_rotary_factor") if key in parameters}
    return others | legacy if legacy else parameters


def rope_for_layer_type(c: Config, kind: str, **overrides: Any) -> Rope:
    """RoPE settings of one layer type: its entry in `rope_parameters`, or those of all layers with `overrides`.

    The context before scaling is that of the entry, or `max_position_embeddings`.
    """
    parameters, overrides = c.get("rope_parameters"), {"original_max_position_embeddings": None} | overrides
    if parameters and not isinstance(parameters.get(kind, kind), Mapping | None):
        raise ValueError(f"rope_parameters: missing entry for layer type {kind!r}")
    if "type" in (legacy := c.get("rope_scaling") or {}) and "rope_type" not in legacy:
        raise ValueError("rope_scaling: 'type' is not supported for layer types, only 'rope_type'")
    c = {**c, **overrides, "rope_parameters": parameters and parameters[kind]}
    reject_config_values(rope_scaling_config(c), {"truncate": True})  # transformers truncates the bounds in any case
    return rope_from_config(c)


def scaling(p: Config, c: Config) -> Scaling | None:
    kind = p.get("rope_type") or p.get("type") or "default"
    inner, outer = p.get("original_max_position_embeddings"), c.get("original_max_position_embeddings")
    context = outer or inner or c["max_position_embeddings"]
    match kind:
        case "default" | "mrope":  # for text, the three positions of multimodal RoPE are equal
            return None
        case "linear":
            return LinearScaling(p["factor"])
        case "llama3":
            return Llama3Scaling(p["factor"], p["low_freq_factor"], p["high_freq_factor"], context)
        case "yarn":
            return yarn(p, context, c["max_position_embeddings"])
        case "longrope":
            return longrope(p, context, c["max_position_embeddings"])
    raise ValueError(f"rope type {kind!r} is not supported, only default, linear, llama3, yarn and longrope")


def longrope(p: Config, context: int, max_positions: int) -> LongRopeScaling:
    factor, attention_factor = p.get("factor") or max_positions / context, p.get("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(context)) if factor > 1 else 1.0
    return LongRopeScaling(tuple(p["short_factor"]), tuple(p["long_factor"]), context, attention_factor)


def yarn(p: Config, context: int, max_positions: int) -> YarnScaling:
    factor, attention_factor = p.get("factor") or max_positions / context, p.get("attention_factor")
    if attention_factor is None and p.get("mscale") and p.get("mscale_all_dim"):
        attention_factor = yarn_mscale(factor, p["mscale"]) / yarn_mscale(factor, p["mscale_all_dim"])
    elif attention_factor is None:
        attention_factor = yarn_mscale(factor, 1.0)
    fast, slow = p.get("beta_fast") or 32.0, p.get("beta_slow") or 1.0
    return YarnScaling(factor, context, fast, slow, p.get("truncate", True), attention_factor)


def yarn_mscale(factor: float, weight: float) -> float:
    """Attention factor of YaRN for a context extension by `factor`."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def head_dim(c: Config) -> int:
    return c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]


def attention_spec(c: Config, **changes: Any) -> Attention:
    heads = c["num_attention_heads"]
    kv_heads = c.get("num_key_value_heads") or heads
    fields = {"bias": bool(c["attention_bias"]), "out_bias": bool(c["attention_bias"]), "rope": rope_from_config(c)}
    return Attention(heads, kv_heads, head_dim(c), **(fields | changes))


def activation(c: Config) -> Act:
    act = c["hidden_act"]
    if act not in ACTS:
        raise ValueError(f"hidden_act (or hidden_activation) {act!r} is not supported, only {', '.join(ACTS)}")
    return ACTS[act]


def mlp_spec(c: Config) -> MLP:
    return MLP(c["intermediate_size"], activation(c), bool(c["mlp_bias"]))


def decoder_spec(c: Config, layers: Iterable[Layer], **changes: Any) -> DecoderSpec:
    fields = {
        "vocab": c["vocab_size"],
        "dim": c["hidden_size"],
        "layers": tuple(layers),
        "norm": Norm(c["rms_norm_eps"]),
        "tie_word_embeddings": bool(c["tie_word_embeddings"]),
        "initializer_range": c["initializer_range"],
        "context": c["max_position_embeddings"],
    }
    return DecoderSpec(**(fields | changes))


def sliding_windows(c: Config) -> list[int | None]:
    """Sliding window of each layer, from `layer_types` or the flags of older configs."""
    first = c["max_window_layers"] if c.get("use_sliding_window") else c["num_hidden_layers"]
    default = [SLIDING if i >= first else FULL for i in range(c["num_hidden_layers"])]
    return [c.get("sliding_window") if kind == SLIDING else None for kind in layer_types(c, default)]


def alternate_layers(c: Config, n: int, sliding: Attention, full: Attention) -> list[Attention]:
    """`sliding` or `full` for each layer of `layer_types`; by default every n-th layer is `full`."""
    return [sliding if kind == SLIDING else full for kind in layer_types(c, all_but_every_nth(n, c))]


def all_but_every_nth(n: int, c: Config, other: str = SLIDING) -> list[str]:
    """Layer types with full attention in every n-th layer and `other` elsewhere."""
    return [other if (i + 1) % n else FULL for i in range(c["num_hidden_layers"])]


def layer_types(c: Config, default: list[str], other: str = SLIDING) -> list[str]:
    """`layer_types` of config.json, or `default`. Raises ValueError unless all are `other` or full attention."""
    types = c.get("layer_types") or default
    if len(types) != c["num_hidden_layers"]:
        raise ValueError(f"layer_types has {len(types)} entries, but num_hidden_layers is {c['num_hidden_layers']}")
    if unsupported := [kind for kind in types if kind not in (other, FULL)]:
        raise ValueError(f"layer_types: {unsupported[0]!r} is not supported, only {other} and {FULL}")
    return types


def layers_with_rope(c: Config) -> list[bool]:
    """Whether each layer uses RoPE: all but every n-th, or as `no_rope_layers` says (1: RoPE)."""
    default = [kind == SLIDING for kind in all_but_every_nth(c["no_rope_layer_interval"], c)]
    flags, count = c.get("no_rope_layers") or default, c["num_hidden_layers"]
    if len(flags) < count:
        raise ValueError(f"no_rope_layers has {len(flags)} entries, but num_hidden_layers is {count}")
    return [bool(flag) for flag in flags[:count]]


TieRule = Callable[[bool | None, bool | None], bool | None]


def outer_ties(outer: bool | None, inner: bool | None) -> bool | None:
    """The flag of a multimodal model decides, or else that of its text section."""
    return inner if outer is None else outer


def outer_ties_by_default(outer: bool | None, inner: bool | None) -> bool:
    """The flag of a multimodal model decides, which is true if it is missing."""
    return outer is None or outer


def either_ties(outer: bool | None, inner: bool | None) -> bool:
    return bool(outer or inner)


def inner_ties(outer: bool | None, inner: bool | None) -> bool | None:
    return inner


def text_config(config: Config, default_type: str, tie_rule: TieRule) -> Config:
    """Text model section of a vision-language config.json; `default_type` is its `model_type` if not stated.

    The first such models have these keys at the top level. `tie_rule` decides between both `tie_word_embeddings`.
    """
    inner = config.get("text_config") or {key: value for key, value in config.items() if key != "model_type"}
    tied = tie_rule(config.get("tie_word_embeddings"), inner.get("tie_word_embeddings"))
    return {"model_type": default_type, **inner, **({} if tied is None else {"tie_word_embeddings": tied})}


def text_model_table(table: tuple[KeyRule, ...], *other_modules: str) -> tuple[KeyRule, ...]:
    """Names of a text model inside a multimodal checkpoint. Tensors of `other_modules` are copied unchanged.

    First the names of transformers >= 4.52, then those of LLaVA, which most Hub files use.
    """
    hub_only = (KeyRule((), name, HubOnly()) for other in other_modules for name in (f"model.{other}", other))
    return *text_model_names(table), KeyRule("head", "language_model.lm_head"), *hub_only


def text_model_names(table: tuple[KeyRule, ...]) -> tuple[KeyRule, ...]:
    """Rules of a text model with both prefixes that it has inside multimodal checkpoints."""
    return *with_prefix("model.language_model.", table), *with_prefix("language_model.model.", table)
