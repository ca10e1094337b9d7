"""Checkpoints without a language model head, of classifiers and of embedding models: their class names in transformers,
and how config.json and tensor names identify them."""

import re

from tunekit.models.families.base import Config
from tunekit.models.spec import ScoreHead
from tunekit.models.weight_map import KeyRule, as_tuple

DOCUMENTS, TOKENS = "ForSequenceClassification", "ForTokenClassification"
# Values of `model_type` with such classes in transformers, whose names start with the type in camel case.
MODEL_TYPES = """
deepseek_v2 deepseek_v3 gemma gemma2 gemma3 gemma3_text glm glm4 gpt_oss hunyuan_v1_dense llama ministral ministral3
mistral mixtral olmo2 olmo3 phi3 qwen2 qwen2_moe qwen3 qwen3_5 qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3
"""
SPECIAL_PREFIXES = {"hunyuan_v1_dense": "HunYuanDenseV1"}
SPECIAL_PREFIXES |= {"qwen3_5": "Qwen3_5", "qwen3_5_text": "Qwen3_5Text", "smollm3": "SmolLM3"}
# Without a token classification class in transformers.
DOCUMENTS_ONLY = {"deepseek_v2", "gemma3", "gemma3_text", "hunyuan_v1_dense", "olmo2", "olmo3", "qwen3_5_text"}
HEAD = "score"  # its name in checkpoints


def classifier_architecture(model_type: str, per_token: bool) -> str | None:
    """transformers class of a `model_type` that scores documents or tokens; None if it does not exist."""
    if model_type not in MODEL_TYPES.split() or (per_token and model_type in DOCUMENTS_ONLY):
        return None
    prefix = SPECIAL_PREFIXES.get(model_type, model_type.title().replace("_", ""))
    return prefix + (TOKENS if per_token else DOCUMENTS)


def score_head(config: Config) -> ScoreHead | None:
    """Head of the class in `architectures`; None for a language model head."""
    architectures = config.get("architectures") or [""]
    if not (isinstance(architectures, list) and str(architectures[0]).endswith((DOCUMENTS, TOKENS))):
        return None
    per_token = architectures[0].endswith(TOKENS)
    labels = config.get("id2label")
    count = config.get("num_labels") or 2 if labels is None else len(labels)
    return ScoreHead(
        count, per_token, per_token and config.get("token_classification_bias", True), pad_token_id(config)
    )


def pad_token_id(config: Config) -> int | None:
    """Padding token id of the text model."""
    return (config.get("text_config") or config).get("pad_token_id")


def classifier_table(rows: tuple[KeyRule, ...]) -> tuple[KeyRule, ...]:
    """Names in a classification checkpoint, from those of the language model."""
    return tuple(KeyRule("head", HEAD) if row.ours == "head" else row for row in rows)


def base_architecture(config: Config) -> str:
    """transformers class of the model without a head."""
    kind, (name, *_) = config["model_type"], config.get("architectures") or [""]
    prefix = re.sub(r"(For[A-Z]\w+|LMHeadModel|Model)?$", "", name, count=1) or kind.title().replace("_", "")
    return prefix + ("Text" if kind.endswith("_text") and not prefix.endswith("Text") else "") + "Model"


def is_base_model(config: Config) -> bool:
    """Whether the class in `architectures` has no head: an embedding model."""
    architectures = config.get("architectures") or [""]
    return isinstance(architectures, list) and bool(re.search(r"(?<!LMHead)Model$", str(architectures[0])))


def base_model_table(rows: tuple[KeyRule, ...]) -> tuple[KeyRule, ...]:
    """Names of the tensors of a base model, whose modules are not below `model`, and which has no head."""
    return tuple(
        KeyRule(row.ours, tuple(name.removeprefix("model.") for name in as_tuple(row.hub)), row.op)
        for row in rows
        if row.ours != "head"
    )
