"""Architectures of llama.cpp as data, and the GGUF names of their tensors."""

from dataclasses import dataclass, replace

from gguf import MODEL_TENSOR as T
from gguf import TENSOR_NAMES

from tunekit.errors import UserError
from tunekit.models.families.base import Config
from tunekit.models.spec import Act, MoE, Norm
from tunekit.models.weight_map import Fused, KeyRule

QKV = ("attn.q_proj", "attn.k_proj", "attn.v_proj")
ALL_LINEAR = (*QKV, "attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")

# GGUF tensors by module.
MODULES = {
    "embed": T.TOKEN_EMBD,
    "norm": T.OUTPUT_NORM,
    "head": T.OUTPUT,
    "layers.{}.attn_norm": T.ATTN_NORM,
    "layers.{}.attn.q_proj": T.ATTN_Q,
    "layers.{}.attn.k_proj": T.ATTN_K,
    "layers.{}.attn.v_proj": T.ATTN_V,
    "layers.{}.attn.o_proj": T.ATTN_OUT,
    "layers.{}.attn.q_norm": T.ATTN_Q_NORM,
    "layers.{}.attn.k_norm": T.ATTN_K_NORM,
    "layers.{}.attn_post_norm": T.ATTN_POST_NORM,
    "layers.{}.mlp_norm": T.FFN_NORM,
    "layers.{}.mlp.gate_proj": T.FFN_GATE,
    "layers.{}.mlp.up_proj": T.FFN_UP,
    "layers.{}.mlp.down_proj": T.FFN_DOWN,
    "layers.{}.mlp.router": T.FFN_GATE_INP,
    "layers.{}.mlp.experts.gate_proj": T.FFN_GATE_EXP,
    "layers.{}.mlp.experts.up_proj": T.FFN_UP_EXP,
    "layers.{}.mlp.experts.down_proj": T.FFN_DOWN_EXP,
    "layers.{}.mlp.shared.gate_proj": T.FFN_GATE_SHEXP,
    "layers.{}.mlp.shared.up_proj": T.FFN_UP_SHEXP,
    "layers.{}.mlp.shared.down_proj": T.FFN_DOWN_SHEXP,
    "layers.{}.mlp.shared_gate": T.FFN_GATE_INP_SHEXP,
    "layers.{}.mlp_post_norm": T.FFN_POST_NORM,
}


def key_rule(ours: str | tuple[str, ...], kind: T, op: Fused | None = None) -> KeyRule:
    name = TENSOR_NAMES[kind].format(bid="{}")
    return KeyRule(ours, name) if op is None else KeyRule(ours, name, op)


TABLE = tuple(key_rule(ours, kind) for ours, kind in MODULES.items())
FUSED = (
    key_rule(tuple(f"layers.{{}}.{name}" for name in QKV), T.ATTN_QKV, Fused()),
    key_rule(("layers.{}.mlp.gate_proj", "layers.{}.mlp.up_proj"), T.FFN_UP, Fused()),
)
DIVISORS, SHORT, LONG = (f"{TENSOR_NAMES[t]}.weight" for t in (T.ROPE_FREQS, T.ROPE_FACTORS_SHORT, T.ROPE_FACTORS_LONG))


@dataclass(frozen=True)
class Architecture:
    """Properties that llama.cpp fixes for a `general.architecture`; all others are fields of the file."""

    name: str
    table: tuple[KeyRule, ...] = TABLE
    act: Act = "silu"
    biases: tuple[str, ...] = QKV  # modules that may have a bias
    tied: bool | None = None  # whether embeddings are tied; None: either
    moe: MoE | None = None  # fixed properties of experts; None: no experts
    # Attention.
    heads_span_width: bool = True  # heads x head_dim is the model width
    qk_norm: Norm | None = None
    softcaps: bool = False  # tanh softcaps of attention scores and logits
    width_scaled_layers: int | None = None  # with this many layers, attention scale is from width / heads
    window_period: int | None = None  # all layers but every N-th have a sliding window; None: no windows
    # Positions.
    interleaved_rope: bool = False  # rotates channels (0, 1), (2, 3), ..., the order of the written rows of q and k
    rope_divisors: bool = False  # frequencies may be divided by a tensor, for the RoPE scaling of Llama 3.1
    longrope: bool = False  # LongRoPE with two tensors
    yarn_ramp: bool = False  # reads beta_fast and beta_slow of YaRN and the temperature tuning of queries
    local_rope: bool = False  # layers with a window have a separate RoPE base without scaling
    nope_period: int | None = None  # every N-th layer has no RoPE
    # Blocks.
    pre_norm: bool = True
    post_norm: bool = False
    scaled_embeddings: bool = False  # embeddings are multiplied by sqrt(dim)
    has_scales: bool = False  # reads scales of embeddings, residuals, attention scores and logits


PER_HEAD, OVER_ALL_HEADS = Norm(), Norm(over_all_heads=True)
LLAMA = Architecture("llama", biases=ALL_LINEAR, heads_span_width=False, interleaved_rope=True, rope_divisors=True)
LLAMA = replace(LLAMA, moe=MoE(0, 0, 0))
MISTRAL3 = Architecture("mistral3", biases=(*QKV, "attn.o_proj"), heads_span_width=False, interleaved_rope=True)
MISTRAL3 = replace(MISTRAL3, yarn_ramp=True)
QWEN2 = Architecture("qwen2")
QWEN3 = Architecture("qwen3", heads_span_width=False, qk_norm=PER_HEAD)
GEMMA = Architecture("gemma", act="gelu_tanh", tied=True, heads_span_width=False, scaled_embeddings=True)
GEMMA2 = replace(GEMMA, name="gemma2", post_norm=True, softcaps=True, width_scaled_layers=46, window_period=2)
GEMMA3 = replace(GEMMA, name="gemma3", post_norm=True, tied=None, width_scaled_layers=62, window_period=6)
GEMMA3 = replace(GEMMA3, qk_norm=PER_HEAD, local_rope=True)
OLMO2 = Architecture(
    "olmo2", tied=False, qk_norm=OVER_ALL_HEADS, window_period=4, local_rope=True, pre_norm=False, post_norm=True
)
# By model_type in config.json, or in its text_config.
ARCHITECTURES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "mistral3": LLAMA,
    "ministral": LLAMA,
    "mixtral": LLAMA,
    "ministral3": MISTRAL3,
    "granite": replace(LLAMA, name="granite", moe=None, has_scales=True),
    "smollm3": Architecture("smollm3", heads_span_width=False, interleaved_rope=True, nope_period=4),
    "olmo2": OLMO2,
    "olmo3": OLMO2,
    "phi3": Architecture("phi3", table=(*FUSED, *TABLE), biases=(), longrope=True),
    "qwen2": QWEN2,
    "qwen2_vl": QWEN2,
    "qwen2_vl_text": QWEN2,
    "qwen2_5_vl": QWEN2,
    "qwen2_5_vl_text": QWEN2,
    "qwen2_moe": Architecture("qwen2moe", tied=False, moe=MoE(0, 0, 0, norm_topk_prob=False, shared_gate=True)),
    "qwen3": QWEN3,
    "qwen3_vl": QWEN3,
    "qwen3_vl_text": QWEN3,
    "qwen3_moe": Architecture("qwen3moe", heads_span_width=False, qk_norm=PER_HEAD, moe=MoE(0, 0, 0)),
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gemma3_text": GEMMA3,
}


def get_architecture(config: Config, where: str) -> Architecture:
    """Architecture of a checkpoint. Raises UserError if it is not supported."""
    kind = (config.get("text_config") or config).get("model_type", config["model_type"])
    if kind not in ARCHITECTURES:
        raise UserError(f"{where}: cannot export model_type {kind} to GGUF; supported: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[kind]
