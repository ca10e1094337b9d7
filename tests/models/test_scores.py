"""Heads that score, against the classes of transformers: their checkpoints with us, and ours with them."""

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

from tests.checkpoints import (
    DEFAULT_MEMORY,
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
KINDS = {shape["model_type"]: name for name, shape in reversed(SHAPES.items())}
DOCUMENTS = [name for kind, name in KINDS.items() if classifiers.classifier_architecture(kind, docs_per_row=False)]
TOKENS = [name for kind, name in KINDS.items() if classifiers.classifier_architecture(kind, docs_per_row=True)]


def rows() -> tuple[Tensor, Tensor]:
    """Padded rows, and where they are not padding."""
    real = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    found = random_tokens()
    return torch.where(real, found.masked_fill(found == PAD, 5), PAD), real


def classifier(each: bool) -> Any:
    return transformers.AutoModelForTokenClassification if each else transformers.AutoModelForSequenceClassification


def built(shape: Mapping[str, Any], labels: int, each: bool) -> transformers.PreTrainedModel:
    """A random model of transformers, far from a fresh one."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**shape, num_labels=labels)
    config.get_text_config().pad_token_id = PAD
    model = classifier(each).from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5)
            else:
                p.normal_(std=0.3 if p.ndim == 1 else 1.5 * p.shape[1] ** -0.5)
    return model.eval()


@torch.no_grad()
def there(model: transformers.PreTrainedModel) -> Tensor:
    """Scores of documents (2, labels), or of all their tokens."""
    found, real = rows()
    logits = model(found, attention_mask=real.long()).logits
    return logits[real] if logits.ndim == 3 else logits


@torch.no_grad()
def here(model: Decoder, each: bool) -> Tensor:
    found, real = rows()
    scores = model(found)
    return scores[real] if each else scores[torch.arange(2), torch.tensor(LENGTHS) - 1]


def reads(name: str, labels: int, each: bool, path: Path) -> None:
    """What transformers wrote gives the same scores here, and is written back bit by bit."""
    model = built(SHAPES[name], labels, each)
    folder = save(model, path / "theirs")
    mine = load_model(folder)
    assert relative_error(here(mine, each), there(model)) < 1e-5
    (path / "back").mkdir()
    save_model.save_model(path / "back", mine, HFCheckpoint.open(folder), quiet=True)
    wanted, found = (load_file(some / "model.safetensors") for some in (folder, path / "back"))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert (path / "back" / "config.json").read_text() == (folder / "config.json").read_text()


def headed(folder: Path, score: ScoreHead, **how: Any) -> tuple[HFCheckpoint, Decoder]:
    """A language model with a fresh head."""
    source = with_score_head(HFCheckpoint.open(folder), score, **how)
    return source, build.build_model(source, NoQuantization(), FULL, FP32, DEFAULT_MEMORY, DistributedContext(0, "cpu"))


def opens(name: str, score: ScoreHead, path: Path) -> None:
    """transformers gets from our files what we have, and nothing is missing or left over."""
    source, mine = headed(make_checkpoint(path / "base", name), score)
    (path / "ours").mkdir()
    save_model.save_model(path / "ours", mine, source, quiet=True)
    model, told = classifier(score.per_token).from_pretrained(
        path / "ours", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    assert [type(model).__name__] == json.loads((path / "ours" / "config.json").read_text())["architectures"]
    assert model.config.num_labels == score.labels and model.config.get_text_config().pad_token_id == PAD
    assert relative_error(here(mine, score.per_token), there(model.eval())) < 1e-5


def test_all_that_transformers_has_is_known() -> None:
    for each, names in (
        (False, modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
        (True, modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES),
    ):
        assert {k: classifiers.classifier_architecture(k, each) for k in FAMILIES} == {
            k: names.get(k) for k in FAMILIES
        }


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents(name: str, tmp_path: Path) -> None:
    reads(name, 3, False, tmp_path)
    opens(name, ScoreHead(1, pad_id=PAD), tmp_path)


@pytest.mark.parametrize("name", TOKENS)
def test_tokens(name: str, tmp_path: Path) -> None:
    reads(name, 2, True, tmp_path)
    opens(name, ScoreHead(4, docs_per_row=True, bias=True, pad_id=PAD), tmp_path)


def test_no_bias_of_tokens(tmp_path: Path) -> None:
    """transformers has a word for it."""
    opens("llama3.1", ScoreHead(2, docs_per_row=True, pad_id=PAD), tmp_path)


def test_a_fresh_head_is_that_of_transformers_but_for_the_draw(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "base", "smollm2")
    weights = [headed(folder, ScoreHead(64, pad_id=PAD), seed=seed)[1].head.weight for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    wanted = json.loads((folder / "config.json").read_text())["initializer_range"]
    assert abs(weights[0].std() / wanted - 1) < 0.05
    biased = headed(
        make_checkpoint(tmp_path / "other", "llama3.1"), ScoreHead(3, docs_per_row=True, bias=True, pad_id=PAD)
    )[1].head
    assert biased.bias is not None and not biased.bias.any()


def test_names_of_labels_are_kept(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "llama3.2")
    source, mine = headed(base, ScoreHead(2, pad_id=PAD), names=("bad", "good"), problem="single_label_classification")
    (tmp_path / "ours").mkdir()
    save_model.save_model(tmp_path / "ours", mine, source, quiet=True)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "ours")
    assert config.id2label == {0: "bad", 1: "good"} and config.label2id == {"bad": 0, "good": 1}
    assert config.problem_type == "single_label_classification"
    again, _ = headed(tmp_path / "ours", ScoreHead(2, pad_id=PAD))
    assert again.config["id2label"] == {"0": "bad", "1": "good"} and again.new_head is None


def test_what_a_checkpoint_is_for(tmp_path: Path) -> None:
    """A head that is there is not thrown away unasked, and none is put where nobody could open it."""
    folder = save(built(SHAPES["llama3.2"], 3, False), tmp_path / "there")
    source = HFCheckpoint.open(folder, "there")
    with pytest.raises(UserError, match="there: gives 3 scores to a document, and 1 score for a document is wanted"):
        with_score_head(source, ScoreHead(1, pad_id=PAD))
    with pytest.raises(UserError, match="there: gives 3 scores to a document and writes no text: name a language"):
        require_language_model(source)
    with pytest.raises(UserError, match="writes no text"):
        build.load_for_inference(str(folder), FP32, DistributedContext(0, "cpu"))
    model, _ = build.load_for_inference(str(folder), FP32, DistributedContext(0, "cpu"), allow_score_head=True)
    assert model.spec.score == ScoreHead(3, pad_id=PAD)
    other = HFCheckpoint.open(make_checkpoint(tmp_path / "granite", "granite"), "granite")
    with pytest.raises(UserError, match="transformers has no granite model that scores documents"):
        with_score_head(other, ScoreHead(1, pad_id=PAD))
    rewrite_config(folder, lambda c: c | {"architectures": ["LlamaForCausalLM"]})
    with pytest.raises(UserError, match="score.weight is no tensor of a llama model"):
        load_model(folder)
