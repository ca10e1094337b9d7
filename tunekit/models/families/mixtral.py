"""Mixtral: Mistral with experts."""

from tunekit.models.families.base import LLAMA, Config, attention, complete, decoder
from tunekit.models.families.moe import EXPERTS, OURS, ROUTER, experts, sparse
from tunekit.models.spec import DecoderSpec, Layer
from tunekit.models.weights import Row

OLD = "model.layers.{}.block_sparse_moe"  # as all published checkpoints have it
TABLE = (
    Row(f"{OURS}.router", f"{OLD}.gate"),
    *experts(f"{OURS}.experts", f"{OLD}.experts", ("w1", "w3", "w2")),
    *ROUTER,
    *EXPERTS,
    *LLAMA,
)
USUAL = {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6}


def spec(config: Config) -> DecoderSpec:
    c = complete(config, **USUAL)
    layer = Layer(attention(c, window=c.get("sliding_window")), sparse(c, c["intermediate_size"]))
    return decoder(c, [layer] * c["num_hidden_layers"])
