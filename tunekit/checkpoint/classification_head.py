"""A checkpoint with a head that scores: one that has it, or a language model whose vocabulary's head it replaces."""

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
    """The checkpoint with this head. Of a language model it is a fresh one; one that is there must be the same.

    `names` are those of the labels, `problem` is what transformers calls the task.
    """
    there = source.spec.score
    if there is not None and (there.labels, there.each) != (score.labels, score.each):
        raise UserError(
            f"{source.name}: {told(there)}, and {wanted(score)} is wanted: name a language model as `model`"
        )
    score = score if there is None else replace(score, bias=there.bias)
    config = described(source, score, names, problem)
    found, spec = find_family(config, str(source.path / "config.json"))
    fresh = seed if there is None else source.fresh
    return replace(source, config=config, family=found, spec=spec, fresh=fresh)


def described(source: HFCheckpoint, score: ScoreHead, names: Sequence[str], problem: str | None) -> Mapping[str, Any]:
    """config.json as transformers writes it for such a model."""
    kind = source.config["model_type"]
    architecture = classifiers.classifier_architecture(kind, score.each)
    if architecture is None:
        what = "tokens" if score.each else "documents"
        raise UserError(f"{source.name}: transformers has no {kind} model that scores {what}, so none could open it")
    there = known(source, score)
    if names and list(names) != list(there) and set(names) & set(there):
        raise UserError(
            f"{source.name}: its classes are {', '.join(there)}: name them in `data.class_names` in this order"
        )
    labels = {str(i): name for i, name in enumerate(names or there)}
    config = {key: value for key, value in source.config.items() if key != "num_labels"}
    config |= {"architectures": [architecture], "id2label": labels, "problem_type": problem}
    config |= {"label2id": {name: int(i) for i, name in labels.items()}}
    config |= {"token_classification_bias": False} if score.each and not score.bias else {}
    if "text_config" in config:
        return config | {"text_config": {**config["text_config"], "pad_token_id": score.pad}}
    return config | {"pad_token_id": score.pad}


def known(source: HFCheckpoint, score: ScoreHead) -> Sequence[str]:
    """The names of labels in a checkpoint that scores; as transformers calls them, where it does not."""
    there: Mapping[str, str] = source.config.get("id2label") or {} if source.spec.score is not None else {}
    return [there[str(i)] for i in range(score.labels)] if there else [f"LABEL_{i}" for i in range(score.labels)]


def require_language_model(source: HFCheckpoint, name: str | None = None) -> None:
    """UserError if a checkpoint scores, where a language model is wanted. `name`: what it was called."""
    if source.spec.score is not None:
        raise UserError(
            f"{name or source.name}: {told(source.spec.score)} and writes no text: name a language model, "
            "or go on with it by the recipe `reward`"
        )


def told(score: ScoreHead) -> str:
    """What a checkpoint with this head does."""
    return f"gives {count(score)} to {'each token' if score.each else 'a document'}"


def wanted(score: ScoreHead) -> str:
    return f"{count(score)} for {'each token' if score.each else 'a document'}"


def count(score: ScoreHead) -> str:
    return f"{score.labels} score{'s' * (score.labels != 1)}"
