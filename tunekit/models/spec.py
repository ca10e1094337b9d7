"""What a decoder is, as data. Nothing here imports torch; every value is frozen, hashes and prints."""

from dataclasses import dataclass, replace
from typing import Literal

Act = Literal["silu", "gelu", "gelu_tanh", "clamped_swiglu"]


@dataclass(frozen=True, slots=True)
class Norm:
    """Root mean square norm over the last axis."""

    eps: float = 1e-6
    offset: float = 0.0  # Gemma and Qwen3.5 store weight - 1
    weight: bool = True  # False: nothing is learnt
    scale_in_fp32: bool = False  # the weight multiplies in fp32, before the cast to the dtype of the activations
    over_all_heads: bool = False  # OLMo: one norm over all heads of q and of k, not one per head


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, those between blended."""

    factor: float
    low: float
    high: float
    context: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071): a ramp over the channels, and `amplitude` on cos and sin."""

    factor: float
    context: int
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE (arXiv:2402.13753): a divisor for each channel pair, others for rows beyond `context`."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    context: int
    attention_factor: float


Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions, in the half-split layout of most of the Hub's checkpoints."""

    theta: float = 10_000.0
    dims: int | None = None  # rotated channels of a head; None: all
    scaling: Scaling | None = None
    interleaved: bool = False  # rotate channels (0, 1), (2, 3) .. and not (0, d/2), (1, d/2 + 1) ..
    interleaved_output: bool = True  # False: paired channels come out as halves, as DeepSeek writes them
    pad: bool = False  # Gemma 4: frequencies of the whole head, zero beyond `dims`


@dataclass(frozen=True, slots=True)
class AttnTemperatureTuning:
    """Llama 4 and Ministral 3: queries grow with the log of their position."""

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
    rope: Rope | None = None  # None: no positions in this layer
    qk_norm: Norm | None = None  # on q and k, before rotation
    norm_after_rope: bool = False
    v_norm: Norm | None = None
    window: int | None = None  # a token sees itself and the window - 1 tokens before it
    chunk: int | None = None  # a token sees only its own stretch of `chunk` positions
    scale: float | None = None  # on the scores; None: head_dim ** -0.5
    softcap: float | None = None  # scores are kept within this by tanh
    sinks: bool = False  # a learnt score of each head that takes probability and gives nothing
    output_gate: bool = False  # q_proj also makes a sigmoid gate on what comes out
    temperature_tuning: AttnTemperatureTuning | None = None
    attention_k_eq_v: bool = False  # the values are the keys, before norm and rotation
    kv_shared_layer: int | None = None  # the number of an earlier layer, whose keys and values are taken


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """DeepSeek's latent attention: keys and values of all heads from one small vector a token (arXiv:2405.04434)."""

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
    """Gated delta rule (arXiv:2412.06464): a state of fixed size in place of keys and values."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv: int  # tokens that the convolution before it sees
    norm: Norm = Norm()
    grouped: bool = False  # two projections, with rows by key heads: all that one needs, then the next


@dataclass(frozen=True, slots=True)
class MLP:
    """Gated feed-forward layer: down(act(gate(x)) * up(x))."""

    intermediate_size: int
    act: Act = "silu"
    bias: bool = False


@dataclass(frozen=True, slots=True)
class MoE:
    """Every token goes through `top_k` of `experts` gated feed-forward layers, and through a shared one if there is."""

    experts: int
    top_k: int
    intermediate_size: int
    act: Act = "silu"
    scoring_func: Literal["softmax", "sigmoid", "top_softmax", "top_sigmoid"] = (
        "softmax"  # top_: of the chosen ones alone
    )
    norm_topk_prob: bool = True  # the weights of the chosen ones add up to 1
    scale: float = 1.0
    groups: tuple[int, int] | None = None  # experts stand in so many groups, of which so many may be chosen from
    selection_bias: bool = False  # a correction that counts in the choice and not in the weights
    router_bias: bool = False
    router_in_fp32: bool = False  # the router multiplies in fp32, and weights of experts stay in it
    bias: bool = False
    apply_router_weight_on_input: bool = False  # the weight multiplies what goes into an expert, not what comes out
    shared_intermediate_size: int = 0  # hidden width of the shared expert; 0: none
    shared_gate: bool = False
    router_norm: Norm | None = None  # Gemma 4 norms and scales what the router sees


@dataclass(frozen=True, slots=True)
class DenseMoE:
    """Gemma 4: a dense layer and experts side by side, each with norms of its own."""

    dense: MLP
    sparse: MoE
    norm: Norm = Norm()


@dataclass(frozen=True, slots=True)
class PerLayerInput:
    """Gemma 4: every layer also sees a small embedding of the token."""

    vocab: int
    dim: int
    act: Act = "gelu_tanh"


Mixer = Attention | LatentAttention | DeltaNet
FeedForward = MLP | MoE | DenseMoE


@dataclass(frozen=True, slots=True)
class Layer:
    """One block: a mixer of tokens, then a feed-forward part, each between norms and beside a residual."""

    mixer: Mixer
    ffn: FeedForward
    pre_norm: bool = True
    post_norm: bool = False
    scaled: bool = False  # Gemma 4: a stored number multiplies what leaves the block


@dataclass(frozen=True, slots=True)
class ScoreHead:
    """A head that scores, in place of the vocabulary's: a document by its last token, or each token."""

    labels: int
    per_token: bool = False  # every token is scored
    bias: bool = False
    pad_token_id: int | None = None  # the last token that is another one is what scores a document


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A whole decoder. `std` is the spread of a fresh weight, `context` the longest row it was trained for."""

    vocab: int
    dim: int
    layers: tuple[Layer, ...]
    norm: Norm = Norm()
    tie_word_embeddings: bool = False  # the head is the embedding
    initializer_range: float = 0.02
    context: int = 2048
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    per_layer: PerLayerInput | None = None
    score: ScoreHead | None = None  # None: a language model

    @property
    def outputs(self) -> int:
        """What the head makes of a token: a logit for each id of the vocabulary, or its scores."""
        return self.vocab if self.score is None else self.score.labels

    def with_score_head(self, score: ScoreHead) -> "DecoderSpec":
        """The same decoder with a head that scores, of which nothing is scaled, capped or shared."""
        return replace(self, score=score, tied=False, logit_scale=1.0, logit_softcap=None)
