"""Architecture of a decoder as data. Torch-free; all values are frozen and hashable."""

from dataclasses import dataclass, replace
from typing import Literal

Act = Literal["silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu"]


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm over the last axis."""

    eps: float = 1e-6
    offset: float = 0.0  # Gemma and Qwen3.5 store weight - 1
    weight: bool = True  # False: no trainable scale
    scale_in_fp32: bool = False  # multiply by the weight in fp32, before the cast to the activation dtype
    over_all_heads: bool = False  # OLMo: one QK norm over all heads instead of one per head
    centered: bool = False  # Cohere: subtract the mean first (a layer norm without bias)


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: frequencies below `low` turns in the context are divided by `factor`, those above `high` are kept, and
    those between are interpolated."""

    factor: float
    low: float
    high: float
    context: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071): a ramp over the channels, and `attention_factor` on cos and sin."""

    factor: float
    context: int
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE (arXiv:2402.13753): a divisor per channel pair; `long` is used for rows longer than `context`."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    context: int
    attention_factor: float


Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embeddings, by default in the half-split layout of most Hub checkpoints."""

    theta: float = 10_000.0
    dims: int | None = None  # rotated channels per head; None: all
    scaling: Scaling | None = None
    interleaved: bool = False  # rotate channels (0, 1), (2, 3), ... instead of (0, d/2), (1, d/2 + 1), ...
    interleaved_output: bool = True  # False: write rotated channels in the half-split layout (DeepSeek)
    pad: bool = False  # Gemma 4: frequencies of the full head, zero beyond `dims`


@dataclass(frozen=True, slots=True)
class AttnTemperatureTuning:
    """Llama 4 and Ministral 3: queries are scaled by the log of their position."""

    beta: float
    floor_scale: float
    shift: float = 0.0


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention with grouped keys and values."""

    heads: int
    kv_heads: int
    head_dim: int
    bias: bool = False
    out_bias: bool = False
    rope: Rope | None = None  # None: no position embeddings in this layer
    qk_norm: Norm | None = None  # on q and k, before RoPE
    norm_after_rope: bool = False
    v_norm: Norm | None = None
    window: int | None = None  # sliding window: attend to the token and window - 1 tokens before it
    chunk: int | None = None  # attend within chunks of this many positions only
    scale: float | None = None  # softmax scale; None: head_dim ** -0.5
    softcap: float | None = None  # tanh soft cap of attention scores
    sinks: bool = False  # one learned logit per head in the softmax denominator (attention sink)
    output_gate: bool = False  # q_proj also computes a sigmoid gate on the output
    temperature_tuning: AttnTemperatureTuning | None = None
    attention_k_eq_v: bool = False  # values are the keys, before norm and RoPE
    kv_shared_layer: int | None = None  # index of an earlier layer whose keys and values are reused


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention of DeepSeek (arXiv:2405.04434): keys and values are expanded from a latent."""

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    rope: Rope
    bias: bool = False
    norm: Norm = Norm()
    scale: float | None = None


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Gated delta rule (arXiv:2412.06464): a state of fixed size instead of keys and values."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv: int  # kernel size of the short convolution
    norm: Norm = Norm()
    grouped: bool = False  # two fused projections (qkvz, ba) with outputs grouped by key head


@dataclass(frozen=True, slots=True)
class ShortConv:
    """Gated short convolution of LFM2: the state is the last inputs."""

    conv: int  # kernel size
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Mamba2:
    """State space model of Mamba 2 (arXiv:2405.21060): a state of fixed size instead of keys and values."""

    heads: int
    head_dim: int
    groups: int  # of heads that share B and C; channels are normalized by group
    state_dim: int
    conv: int  # kernel size of the short convolution
    conv_bias: bool = True
    bias: bool = False
    out_bias: bool = False
    norm: Norm | None = Norm()  # None: only a gate
    norm_before_gate: bool = False
    multipliers: tuple[float, ...] | None = None  # Falcon-H1: of the projected gate, inputs, B, C and step sizes
    adaptable_out_proj: bool = True  # False: PEFT refuses LoRA on out_proj


@dataclass(frozen=True, slots=True)
class ParallelMixers:
    """Falcon-H1: sum of attention and Mamba 2, with factors on the inputs and outputs of each."""

    attention: Attention
    mamba: Mamba2
    attention_scales: tuple[float, float] = (1.0, 1.0)
    mamba_scales: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True, slots=True)
class MLP:
    """Gated feed-forward layer: down(act(gate(x)) * up(x))."""

    intermediate_size: int
    act: Act = "silu"
    bias: bool = False
    gated: bool = True  # False: the up projection is its own gate; with relu, this is the squared ReLU
    scales: tuple[float, float] = (1.0, 1.0)  # Falcon-H1: of the gate and of the output
    sparsity: float = 0.0  # Gemma 3n: fraction of the gate that is 0, if its values are normally distributed


@dataclass(frozen=True, slots=True)
class MoE:
    """Mixture of experts: each token uses `top_k` of `experts` gated feed-forward layers, plus an optional shared
    expert."""

    experts: int
    top_k: int
    intermediate_size: int
    act: Act = "silu"
    # top_*: over the selected experts only
    scoring_func: Literal["softmax", "sigmoid", "top_softmax", "top_sigmoid"] = "softmax"
    norm_topk_prob: bool = True  # weights of the selected experts sum to 1
    scale: float = 1.0
    groups: tuple[int, int] | None = None  # (number of groups, number of groups that experts are selected from)
    selection_bias: bool = False  # bias used for selection only, not for the weights
    router_bias: bool = False
    router_in_fp32: bool = False  # router matmul and expert weighting in fp32
    bias: bool = False
    apply_router_weight_on_input: bool = False  # weight the expert inputs instead of outputs
    shared_intermediate_size: int = 0  # of the shared expert; 0: no shared expert
    shared_gate: bool = False
    router_norm: Norm | None = None  # Gemma 4: norm and scale of the router input
    router_aux_loss_coef: float = 0.0  # weight of the load-balancing loss; 0 unless config.json turns it on
    gated: bool = True  # as in MLP
    swiglu: tuple[float, float] | None = None  # limit and alpha of clamped_swiglu; None: those of gpt-oss


@dataclass(frozen=True, slots=True)
class DenseMoE:
    """Gemma 4: a dense layer and experts in parallel, each with its own norms."""

    dense: MLP
    sparse: MoE
    norm: Norm = Norm()


@dataclass(frozen=True, slots=True)
class PerLayerInput:
    """Gemma 3n and 4: each layer receives a small embedding of the token."""

    vocab: int
    dim: int
    act: Act = "gelu_tanh"
    unknown_id: int | None = None  # stands for tokens outside of `vocab`; None: there are none


@dataclass(frozen=True, slots=True)
class AltUp:
    """Gemma 3n: alternating updates of several residual streams (arXiv:2301.13310), and a low-rank residual
    (arXiv:2411.07501)."""

    streams: int
    laurel_rank: int
    coef_clip: float | None = None  # limit of the coefficients in training
    scales_output: bool = True  # scale the first stream before the gate of the per-layer input


Mixer = Attention | LatentAttention | DeltaNet | ShortConv | Mamba2 | ParallelMixers
FeedForward = MLP | MoE | DenseMoE


@dataclass(frozen=True, slots=True)
class Layer:
    """Decoder layer: a token mixer and a feed-forward layer, each with norms and a residual connection. Layers of some
    families have only one of the two; a layer without both is the identity."""

    mixer: Mixer | None
    ffn: FeedForward | None
    pre_norm: bool = True
    post_norm: bool = False
    scaled: bool = False  # Gemma 4: multiply the layer output by a stored scalar
    parallel: bool = False  # Cohere: mixer and feed-forward layer read the same normalized input


@dataclass(frozen=True, slots=True)
class ScoreHead:
    """Classification head instead of the language model head: scores of a document (at its last token) or of each
    token."""

    labels: int
    per_token: bool = False  # scores for each token instead of each document
    bias: bool = False
    pad_token_id: int | None = None  # documents are scored at the last token that is not padding


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Complete decoder. `initializer_range` is the standard deviation of random weights, `context` the maximum trained
    length."""

    vocab: int
    dim: int
    layers: tuple[Layer, ...]
    norm: Norm = Norm()
    tie_word_embeddings: bool = False  # lm_head shares the embedding's weight
    initializer_range: float = 0.02
    context: int = 2048
    extra_embeddings: int = 0  # Llama 3.2 Vision: rows of the embedding that are not in the vocabulary
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    per_layer: PerLayerInput | None = None
    altup: AltUp | None = None
    score: ScoreHead | None = None  # None: a language model

    @property
    def outputs(self) -> int:
        """Number of outputs per token: vocabulary size, or number of scores."""
        return self.vocab if self.score is None else self.score.labels

    def with_score_head(self, score: ScoreHead) -> "DecoderSpec":
        """This decoder with a classification head, without logit scaling, soft cap and tied weights."""
        return replace(self, score=score, tie_word_embeddings=False, logit_scale=1.0, logit_softcap=None)
