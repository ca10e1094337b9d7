"""OLMoE: experts everywhere, norms over all heads of q and k together."""

from tunekit.models.families.base import LLAMA, Config, attention, complete, decoder, refuse
from tunekit.models.families.moe import EXPERTS, ROUTER, sparse
from tunekit.models.spec import DecoderSpec, Layer, Norm

TABLE = (*EXPERTS, *ROUTER, *LLAMA)
USUAL = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "norm_topk_prob": False, "num_experts_per_tok": 8}


def spec(config: Config) -> DecoderSpec:
    c = complete(config, **USUAL)
    refuse(c, {"clip_qkv": None})
    mixer = attention(c, qk_norm=Norm(c["rms_norm_eps"], across_heads=True))
    moe = sparse(c, c["intermediate_size"], normalize=c["norm_topk_prob"])
    return decoder(c, [Layer(mixer, moe)] * c["num_hidden_layers"])
