"""Models with a score head, compared with the classifiers of transformers in both directions."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.auto import modeling_auto

from tests.helpers.random_checkpoints import (
    DEFAULT_MEMORY,
    FIRST_SHAPES,
    FP32,
    FULL,
    SHAPES,
    load_model,
    make_checkpoint,
    random_tokens,
    relative_error,
    rewrite_config,
    save,
)
from tunekit import build
from tunekit.checkpoint import save_model
from tunekit.checkpoint.classification_head import require_language_model, with_score_head
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.models.decoder import Decoder
from tunekit.models.families import classifiers
from tunekit.models.families.registry import FAMILIES
from tunekit.models.spec import ScoreHead
from tunekit.quantization.config import NoQuantization

LENGTHS = (23, 17)
PAD = 3
SEQUENCE_CLASSIFIERS = [
    name for kind, name in FIRST_SHAPES.items() if classifiers.classifier_architecture(kind, per_token=False)
]
TOKEN_CLASSIFIERS = [
    name for kind, name in FIRST_SHAPES.items() if classifiers.classifier_architecture(kind, per_token=True)
]


def padded_rows() -> tuple[Tensor, Tensor]:
    """Padded rows, and a mask of their tokens."""
    is_token = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    tokens = random_tokens()
    return torch.where(is_token, tokens.masked_fill(tokens == PAD, 5), PAD), is_token


def classifier_class(per_token: bool) -> Any:
    return (
        transformers.AutoModelForTokenClassification if per_token else transformers.AutoModelForSequenceClassification
    )


def build_classifier(shape: Mapping[str, Any], labels: int, per_token: bool) -> transformers.PreTrainedModel:
    """Random transformers classifier whose weights are far from initial values."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**shape, num_labels=labels)
    config.get_text_config().pad_token_id = PAD
    model = classifier_class(per_token).from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5)
            else:
                p.normal_(std=0.3 if p.ndim == 1 else 1.5 * p.shape[1] ** -0.5)
    return model.eval()


@torch.no_grad()
def transformers_scores(model: transformers.PreTrainedModel) -> Tensor:
    """Scores of documents (2, labels), or of all their tokens."""
    tokens, is_token = padded_rows()
    logits = model(tokens, attention_mask=is_token.long()).logits
    return logits[is_token] if logits.ndim == 3 else logits


@torch.no_grad()
def our_scores(model: Decoder, per_token: bool) -> Tensor:
    tokens, is_token = padded_rows()
    scores = model(tokens)
    return scores[is_token] if per_token else scores[torch.arange(2), torch.tensor(LENGTHS) - 1]


def check_load_and_save(name: str, labels: int, per_token: bool, path: Path) -> None:
    """A checkpoint of transformers gives the same scores, and is saved bit by bit as it was."""
    model = build_classifier(SHAPES[name], labels, per_token)
    folder = save(model, path / "theirs")
    decoder = load_model(folder)
    assert relative_error(our_scores(decoder, per_token), transformers_scores(model)) < 3e-5
    (path / "back").mkdir()
    save_model.save_model(path / "back", decoder, HFCheckpoint.open(folder), quiet=True)
    expected, actual = (load_file(directory / "model.safetensors") for directory in (folder, path / "back"))
    assert actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in expected)
    assert (path / "back" / "config.json").read_text() == (folder / "config.json").read_text()


def build_with_new_head(folder: Path, score: ScoreHead, **options: Any) -> tuple[HFCheckpoint, Decoder]:
    """Language model with a new score head."""
    source = with_score_head(HFCheckpoint.open(folder), score, **options)
    return source, build.build_model(source, NoQuantization(), FULL, FP32, DEFAULT_MEMORY, DistributedContext(0, "cpu"))


def check_loads_in_transformers(name: str, score: ScoreHead, path: Path) -> None:
    """transformers loads our checkpoint with the same scores, without missing or unexpected tensors."""
    source, decoder = build_with_new_head(make_checkpoint(path / "base", name), score)
    (path / "ours").mkdir()
    save_model.save_model(path / "ours", decoder, source, quiet=True)
    model, loading_info = classifier_class(score.per_token).from_pretrained(
        path / "ours", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert (
        not loading_info["missing_keys"] and not loading_info["unexpected_keys"] and not loading_info["mismatched_keys"]
    )
    assert [type(model).__name__] == json.loads((path / "ours" / "config.json").read_text())["architectures"]
    assert model.config.num_labels == score.labels and model.config.get_text_config().pad_token_id == PAD
    assert relative_error(our_scores(decoder, score.per_token), transformers_scores(model.eval())) < 3e-5


def test_classifier_architectures_are_those_of_transformers() -> None:
    for per_token, names in (
        (False, modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
        (True, modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES),
    ):
        assert {k: classifiers.classifier_architecture(k, per_token) for k in FAMILIES} == {
            k: names.get(k) for k in FAMILIES
        }


@pytest.mark.parametrize("name", SEQUENCE_CLASSIFIERS)
def test_sequence_classification(name: str, tmp_path: Path) -> None:
    check_load_and_save(name, 3, False, tmp_path)
    check_loads_in_transformers(name, ScoreHead(1, pad_token_id=PAD), tmp_path)


@pytest.mark.parametrize("name", TOKEN_CLASSIFIERS)
def test_token_classification(name: str, tmp_path: Path) -> None:
    check_load_and_save(name, 2, True, tmp_path)
    check_loads_in_transformers(name, ScoreHead(4, per_token=True, bias=True, pad_token_id=PAD), tmp_path)


def test_token_classification_without_bias(tmp_path: Path) -> None:
    """transformers has an option for it."""
    check_loads_in_transformers("llama3.1", ScoreHead(2, per_token=True, pad_token_id=PAD), tmp_path)


def test_new_head_is_initialized_as_in_transformers(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "base", "smollm2")
    weights = [
        build_with_new_head(folder, ScoreHead(64, pad_token_id=PAD), seed=seed)[1].head.weight for seed in (0, 0, 1)
    ]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    std = json.loads((folder / "config.json").read_text())["initializer_range"]
    assert abs(weights[0].std() / std - 1) < 0.05
    biased = build_with_new_head(
        make_checkpoint(tmp_path / "other", "llama3.1"), ScoreHead(3, per_token=True, bias=True, pad_token_id=PAD)
    )[1].head
    assert biased.bias is not None and not biased.bias.any()


def test_label_names_are_saved(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "llama3.2")
    source, decoder = build_with_new_head(
        base, ScoreHead(2, pad_token_id=PAD), names=("bad", "good"), problem="single_label_classification"
    )
    (tmp_path / "ours").mkdir()
    save_model.save_model(tmp_path / "ours", decoder, source, quiet=True)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "ours")
    assert config.id2label == {0: "bad", 1: "good"} and config.label2id == {"bad": 0, "good": 1}
    assert config.problem_type == "single_label_classification"
    reloaded, _ = build_with_new_head(tmp_path / "ours", ScoreHead(2, pad_token_id=PAD))
    assert reloaded.config["id2label"] == {"0": "bad", "1": "good"} and reloaded.new_head is None


def test_existing_head_must_match_its_use(tmp_path: Path) -> None:
    """An existing head is not replaced silently, and no head is added that transformers could not load."""
    folder = save(build_classifier(SHAPES["llama3.2"], 3, False), tmp_path / "there")
    source = HFCheckpoint.open(folder, "there")
    with pytest.raises(UserError, match="there"):
        with_score_head(source, ScoreHead(1, pad_token_id=PAD))
    with pytest.raises(UserError, match="there"):
        require_language_model(source)
    with pytest.raises(UserError, match="language model"):
        build.load_for_inference(str(folder), FP32, DistributedContext(0, "cpu"))
    model, _ = build.load_for_inference(str(folder), FP32, DistributedContext(0, "cpu"), allow_score_head=True)
    assert model.spec.score == ScoreHead(3, pad_token_id=PAD)
    other = HFCheckpoint.open(make_checkpoint(tmp_path / "granite", "granite"), "granite")
    with pytest.raises(UserError, match="granite"):
        with_score_head(other, ScoreHead(1, pad_token_id=PAD))
    rewrite_config(folder, lambda c: c | {"architectures": ["LlamaForCausalLM"]})
    with pytest.raises(UserError, match=r"score\.weight"):
        load_model(folder)
