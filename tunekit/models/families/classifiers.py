"""Checkpoints whose head scores: what transformers calls their classes, and how config.json and their tensors tell."""

from collections.abc import Mapping
from typing import Any

from tunekit.models.families.base import Config
from tunekit.models.spec import ScoreHead
from tunekit.models.weight_map import KeyRule

DOCUMENTS, TOKENS = "ForSequenceClassification", "ForTokenClassification"
# What stands before these words, by `model_type`.
CLASS_PREFIXES = {
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "gemma3_text": "Gemma3Text",
    "glm": "Glm",
    "glm4": "Glm4",
    "gpt_oss": "GptOss",
    "llama": "Llama",
    "ministral": "Ministral",
    "ministral3": "Ministral3",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "phi3": "Phi3",
    "qwen2": "Qwen2",
    "qwen2_moe": "Qwen2Moe",
    "qwen3": "Qwen3",
    "qwen3_5": "Qwen3_5",
    "qwen3_5_text": "Qwen3_5Text",
    "qwen3_moe": "Qwen3Moe",
    "qwen3_next": "Qwen3Next",
    "smollm3": "SmolLM3",
}
# Of these there is no class for tokens.
DOCUMENTS_ONLY = {"deepseek_v2", "gemma3", "gemma3_text", "olmo2", "olmo3", "qwen3_5_text"}
HEAD = "score"  # its name there


def classifier_architecture(model_type: str, per_token: bool) -> str | None:
    """The class of a `model_type` that scores documents, or each token; None: there is none."""
    prefix = None if per_token and model_type in DOCUMENTS_ONLY else CLASS_PREFIXES.get(model_type)
    return None if prefix is None else prefix + (TOKENS if per_token else DOCUMENTS)


def score_head(config: Config) -> ScoreHead | None:
    """The head of the class that config.json names; None: one over the vocabulary."""
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
    """The id of the token that pads, as the text model has it."""
    return inner_text_config(config).get("pad_token_id")


def inner_text_config(config: Config) -> Mapping[str, Any]:
    """What config.json says of the text model: all of it, or a part."""
    return config.get("text_config") or config


def classifier_table(rows: tuple[KeyRule, ...]) -> tuple[KeyRule, ...]:
    """The names of a checkpoint that scores, from those of the language model."""
    return tuple(KeyRule("head", HEAD) if row.ours == "head" else row for row in rows)


def lm_head_names(rows: tuple[KeyRule, ...]) -> tuple[KeyRule, ...]:
    """The heads over the vocabulary, which no such checkpoint has."""
    return tuple(row for row in rows if row.ours == "head")
