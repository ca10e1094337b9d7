"""Checkpoints with a score head, for sequence or token classification and reward models, or without any head."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.errors import UserError
from tunekit.models.families import classifiers
from tunekit.models.families.registry import find_family
from tunekit.models.spec import ScoreHead


def with_score_head(
    source: HFCheckpoint, score: ScoreHead, seed: int = 0, names: Sequence[str] = (), problem: str | None = None
) -> HFCheckpoint:
    """Return `source` with a score head. Replaces the head of a language model by a new one, initialized from `seed`.

    `names` are label names, `problem` is the `problem_type` of transformers. Raises UserError if the checkpoint has a
    different score head.
    """
    existing = source.spec.score
    if existing is not None and (existing.labels, existing.per_token) != (score.labels, score.per_token):
        problem = f"{source.name} has {describe_outputs(existing)}, but {describe_outputs(score)} are required"
        raise UserError(f"model: {problem}. Use a base language model.")
    score = score if existing is None else replace(score, bias=existing.bias)
    config = score_config(source, score, names, problem)
    family, spec = find_family(config, str(source.path / "config.json"))
    new_head = seed if existing is None else source.new_head
    return replace(source, config=config, family=family, spec=spec, new_head=new_head)


def score_config(
    source: HFCheckpoint, score: ScoreHead, names: Sequence[str], problem: str | None
) -> Mapping[str, Any]:
    """config.json of a model with this score head, as saved by transformers."""
    kind = source.config["model_type"]
    architecture = classifiers.classifier_architecture(kind, score.per_token)
    if architecture is None:
        unit = "tokens" if score.per_token else "documents"
        raise UserError(f"model: {source.name}: transformers has no {kind} model with a score head for {unit}.")
    existing = label_names(source, score)
    if names and list(names) != list(existing) and set(names) & set(existing):
        classes = f"the classes of {source.name} in their order: {', '.join(existing)}"
        raise UserError(f"data.class_names: must list {classes}")
    labels = {str(i): name for i, name in enumerate(names or existing)}
    config = {key: value for key, value in source.config.items() if key != "num_labels"}
    config |= {"architectures": [architecture], "id2label": labels, "problem_type": problem}
    config |= {"label2id": {name: int(i) for i, name in labels.items()}}
    config |= {"token_classification_bias": False} if score.per_token and not score.bias else {}
    if "text_config" in config:
        return config | {"text_config": {**config["text_config"], "pad_token_id": score.pad_token_id}}
    return config | {"pad_token_id": score.pad_token_id}


def label_names(source: HFCheckpoint, score: ScoreHead) -> Sequence[str]:
    """Label names of a checkpoint, by default those of transformers (`LABEL_0`, ...)."""
    labels: Mapping[str, str] = source.config.get("id2label") or {} if source.spec.score is not None else {}
    return [labels[str(i)] for i in range(score.labels)] if labels else [f"LABEL_{i}" for i in range(score.labels)]


def without_head(source: HFCheckpoint) -> HFCheckpoint:
    """Return `source` as a base model, which has no head. Raises UserError if it has a score head."""
    if source.spec.score is not None:
        raise UserError(f"model: {source.name} has a score head, not embeddings. Use a base language model.")
    config = {**source.config, "architectures": [classifiers.base_architecture(source.config)]}
    family, spec = find_family(config, str(source.path / "config.json"))
    return replace(source, config=config, family=family, spec=spec)


def require_language_model(source: HFCheckpoint, name: str | None = None) -> None:
    """Raise UserError if a checkpoint has another head, or none. `name` is how the user referred to it."""
    if source.is_base_model:
        raise UserError(
            f"{name or source.name}: an embedding model without a language model head, which cannot generate text. "
            "Use a language model, or continue training with the recipe embed."
        )
    if source.spec.score is not None:
        outputs = describe_outputs(source.spec.score)
        raise UserError(
            f"{name or source.name}: has a score head with {outputs} and cannot generate text. "
            "Use a language model, or continue training with the recipe reward."
        )


def describe_outputs(score: ScoreHead) -> str:
    """Number of outputs of a score head, such as `2 outputs per token`."""
    unit = "token" if score.per_token else "document"
    return f"{score.labels} output{'s' * (score.labels != 1)} per {unit}"
