"""Code snippets for model cards, which load a model with transformers and generate text or scores."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunekit.checkpoint import peft_adapter, sentence_transformers
from tunekit.checkpoint.adapter_dir import HEAD_KEY, AdapterDir
from tunekit.checkpoint.hf_checkpoint import read_json
from tunekit.hub import redact
from tunekit.models.families import classifiers
from tunekit.models.spec import ScoreHead
from tunekit.publishing.base_model import BaseModelInfo
from tunekit.templates.render import render_template

# transformers class and Hub pipeline tag of models with a score head, by PEFT task type.
SCORE_TASKS = {
    "SEQ_CLS": ("AutoModelForSequenceClassification", "text-classification"),
    "TOKEN_CLS": ("AutoModelForTokenClassification", "token-classification"),
}


@dataclass(frozen=True)
class ScoreHeadInfo:
    """Score head of a model, its label names and its transformers problem_type, and whether it is a reranker."""

    score: ScoreHead
    names: Mapping[str, str]
    problem: str | None
    is_reranker: bool

    @staticmethod
    def from_dir(folder: Path) -> "ScoreHeadInfo | None":
        """Score head of a checkpoint or adapter; None for a language model."""
        if AdapterDir.is_adapter(folder):
            adapter = AdapterDir.open(folder)
            head, metadata = adapter.score_head, adapter.metadata(HEAD_KEY)
        else:
            metadata = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
            head = classifiers.score_head(metadata)
        names, problem = metadata.get("id2label") or {}, metadata.get("problem_type")
        is_reranker = sentence_transformers.is_cross_encoder(folder)
        return None if head is None else ScoreHeadInfo(head, names, problem, is_reranker)

    @property
    def task(self) -> str:
        """PEFT task type."""
        return peft_adapter.task_type(self.score)

    @property
    def description(self) -> str:
        """Sentence about the meaning of the scores."""
        if self.score.per_token:
            classes = "whether it is right (class 1)" if self.score.labels == 2 else f"its class of {self.score.labels}"
            return f"It predicts for each step of an answer {classes}, at the last token of the step."
        if self.problem == "regression":
            return "It predicts a number for a text."
        if self.problem == "multi_label_classification" and self.is_reranker:
            return "It predicts how relevant a document is to a query: the logit of a probability."
        if self.problem == "multi_label_classification":
            return "It predicts the logit of the probability that the label of a text is 1."
        if self.is_reranker:
            return "It predicts how relevant a document is to a query. The more relevant document has the higher score."
        if self.score.labels > 1:
            classes = ", ".join(f"`{name}`" for name in self.names.values()) or self.score.labels
            return f"It predicts the class of a text: {classes}."
        return (
            "It predicts the reward of an answer. Of two answers to a prompt, the one with the higher reward is better."
        )

    @property
    def load_options(self) -> str:
        """Keyword arguments of `from_pretrained` for the base of an adapter with this head."""
        classes = f"id2label=dict(enumerate({json.dumps(list(self.names.values()))}))"
        labels = classes if self.has_custom_names else f"num_labels={self.score.labels}"
        return f", {labels}, pad_token_id={self.score.pad_token_id}"

    @property
    def has_custom_names(self) -> bool:
        """Whether the label names differ from the defaults of transformers."""
        return any(name != f"LABEL_{key}" for key, name in self.names.items())

    @property
    def usage(self) -> str:
        """Task of the snippet of a card: scores of steps, of a reranker, of a reward model or of classes."""
        if self.score.per_token:
            return "steps"
        is_reward = self.problem is None and self.score.labels == 1
        return "rerank" if self.is_reranker else "reward" if is_reward else "classify"


@dataclass(frozen=True)
class PromptFormat:
    """Format of the training rows of a scoring model. `is_chat` is None if it is unknown."""

    is_chat: bool | None = None
    separator: str = "\n"


UNKNOWN_FORMAT = PromptFormat()


def describe_scores(folder: Path) -> str:
    """Sentence about the outputs of a model; empty for a language model."""
    if sentence_transformers.is_embedding_model(folder):
        return " It embeds texts for search: those with a similar meaning have similar vectors."
    head = ScoreHeadInfo.from_dir(folder)
    return "" if head is None else f" {head.description}"


def library_name(folder: Path) -> str:
    """Library that opens the model."""
    if sentence_transformers.is_embedding_model(folder):
        return "sentence-transformers"
    return "peft" if AdapterDir.is_adapter(folder) else "transformers"


def pipeline_tag(folder: Path) -> str:
    """Pipeline tag of the Hub."""
    if sentence_transformers.is_embedding_model(folder):
        return "sentence-similarity"
    head = ScoreHeadInfo.from_dir(folder)
    return "text-generation" if head is None else SCORE_TASKS[head.task][1]


def usage_snippet(
    folder: Path,
    name: str,
    base: BaseModelInfo | None,
    quantization: Mapping[str, Any] | None = None,
    prompt_format: PromptFormat = UNKNOWN_FORMAT,
) -> str:
    """Code for transformers and peft, and the command to chat with the model.

    `quantization` is that of the base of an adapter.
    """
    base_name = "" if base is None else base.repo or base.name
    adapter = AdapterDir.open(folder) if AdapterDir.is_adapter(folder) else None
    head, has_template = ScoreHeadInfo.from_dir(folder), has_chat_template(folder)
    changes = {} if adapter is None else dict(adapter.config_changes)
    num_rows = changes.pop(peft_adapter.VOCAB_SIZE, None)
    values = {"name": name, "is_adapter": adapter is not None, "num_rows": num_rows}
    values["base"] = base_name or (adapter and redact.redact_path(adapter.peft.base_name))
    values["base_is_dir"] = adapter is not None and base is not None and base.repo is None
    is_4bit = adapter is not None and "double_quant" in (quantization or {})  # a format of bitsandbytes
    values["quantization"] = quantization if is_4bit else None
    values["options"] = ("" if head is None else head.load_options) + config_options(changes)
    if sentence_transformers.is_embedding_model(folder):
        values["task"] = "embed"
    elif head is None:
        values |= {"task": "generate", "auto": "AutoModelForCausalLM", "is_chat": has_template}
    else:
        is_chat = has_template if prompt_format.is_chat is None else prompt_format.is_chat
        values |= {"task": head.usage, "auto": SCORE_TASKS[head.task][0], "is_chat": is_chat}
        values |= {"num_labels": head.score.labels, "separator": json.dumps(prompt_format.separator)}
    return render_template("usage.md.j2", **values).rstrip()


def config_options(changes: dict[str, Any]) -> str:
    """Arguments with which transformers loads the base of an adapter that was trained with other config values."""
    theta, scaling = changes.pop("rope_theta", None), changes.pop("rope_scaling", None)
    if theta is not None:
        changes["rope_parameters"] = {"rope_theta": theta, "rope_type": "default"} | (scaling or {})
    return "".join(f", {key}={value!r}" for key, value in changes.items())


def has_chat_template(folder: Path) -> bool:
    config = folder / "tokenizer_config.json"
    return (folder / "chat_template.jinja").is_file() or (config.is_file() and "chat_template" in read_json(config))
