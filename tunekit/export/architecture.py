"""What llama.cpp computes for a file: its architectures as data, and the names that their tensors have."""

from dataclasses import dataclass

from gguf import MODEL_TENSOR as T
from gguf import TENSOR_NAMES

from tunekit.errors import UserError
from tunekit.models.families.base import Config
from tunekit.models.spec import Act
from tunekit.models.weights import Row

ATTENTION_BIASES = ("attn.q_proj", "attn.k_proj", "attn.v_proj")
ALL_BIASES = (*ATTENTION_BIASES, "attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@dataclass(frozen=True)
class Architecture:
    """What is fixed for all files of one `general.architecture`; the numbers stand in the files."""

    name: str
    act: Act = "silu"
    biases: tuple[str, ...] = ()  # layers that may have one
    paired: bool = False  # rotates channels (0, 1), (2, 3) ..: rows of q and k are written in that order
    divisors: bool = False  # a tensor of its own divides the frequencies, as Llama 3.1 stretches long waves
    square: bool = False  # all heads together are as wide as the model
    qk_norm: bool = False
    post_norm: bool = False  # norms behind the parts of a block, too
    scaled: bool = False  # embeddings are multiplied by the root of their width
    caps: bool = False  # scores and logits are kept within bounds by tanh
    pattern: int | None = None  # all but every so-manieth layer look back over a window
    own_base: bool = False  # layers with a window have a rotation of their own, never stretched
    wide: int | None = None  # with so many layers, scores are scaled by width / heads and not by the width of a head


LLAMA = Architecture("llama", biases=ALL_BIASES, paired=True, divisors=True)
GEMMA = Architecture("gemma", act="gelu_tanh", scaled=True)
GEMMA2 = Architecture("gemma2", act="gelu_tanh", scaled=True, post_norm=True, caps=True, pattern=2, wide=46)
GEMMA3 = Architecture(
    "gemma3", act="gelu_tanh", scaled=True, post_norm=True, qk_norm=True, pattern=6, own_base=True, wide=62
)
# By the model_type of config.json.
ARCHITECTURES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": Architecture("qwen2", biases=ATTENTION_BIASES, square=True),
    "qwen3": Architecture("qwen3", biases=ATTENTION_BIASES, qk_norm=True),
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gemma3_text": GEMMA3,
}

# Our modules under gguf's names.
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
    "layers.{}.mlp_post_norm": T.FFN_POST_NORM,
}
TABLE = tuple(Row(ours, TENSOR_NAMES[kind].format(bid="{}")) for ours, kind in MODULES.items())
DIVISORS = f"{TENSOR_NAMES[T.ROPE_FREQS]}.weight"


def architecture(config: Config, where: str) -> Architecture:
    """The architecture of the files of such a checkpoint."""
    kind = config["model_type"]
    if kind not in ARCHITECTURES:
        raise UserError(f"{where}: a {kind} model cannot be exported to GGUF here; {', '.join(ARCHITECTURES)} can")
    return ARCHITECTURES[kind]
