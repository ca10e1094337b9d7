"""Granite, dense: Llama with multipliers on embeddings, residuals, attention scores and logits."""

from tunekit.models.families.base import Config, attention_spec, decoder_spec, mlp_spec, with_default_config
from tunekit.models.spec import DecoderSpec, Layer

DEFAULTS = {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0, "logits_scaling": 1.0}


def spec(config: Config) -> DecoderSpec:
    c = with_default_config(config, **DEFAULTS)
    layer = Layer(attention_spec(c, scale=c["attention_multiplier"]), mlp_spec(c))
    return decoder_spec(
        c,
        [layer] * c["num_hidden_layers"],
        embed_scale=c["embedding_multiplier"],
        residual_scale=c["residual_multiplier"],
        logit_scale=1 / c["logits_scaling"],
    )
