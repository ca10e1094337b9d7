"""Reading and copying the modules of an embedding model."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.random_checkpoints import make_checkpoint
from tunekit.checkpoint.classification_head import with_score_head
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.save_model import unrelated_files
from tunekit.checkpoint.sentence_transformers import choose_pooling, copy_modules, is_embedding_model
from tunekit.errors import UserError
from tunekit.models.spec import ScoreHead

TRANSFORMER = ("", "sentence_transformers.models.Transformer")
POOLING = ("1_Pooling", "sentence_transformers.sentence_transformer.modules.pooling.Pooling")
NORMALIZE = ("2_Normalize", "sentence_transformers.base.modules.normalize.Normalize")
DENSE = ("2_Dense", "sentence_transformers.base.modules.dense.Dense")
MEAN = {"pooling_mode": "mean"}


def write_modules(folder: Path, modules: Sequence[tuple[str, str]], pooling: dict[str, Any]) -> Path:
    """A directory with these modules."""
    for path, kind in modules:
        (folder / path).mkdir(parents=True, exist_ok=True)
        (folder / path / "config.json").write_text(json.dumps(pooling if kind.endswith("Pooling") else {}))
    entries = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(entries))
    return folder


@pytest.mark.parametrize(("modules", "config", "expected"), [
    ([TRANSFORMER, POOLING, NORMALIZE], MEAN, "mean"),
    ([TRANSFORMER, ("3_Other", "sentence_transformers.models.pooling.Pooling")], MEAN, "mean"),
    ([TRANSFORMER, POOLING], {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
    ([TRANSFORMER, ("1_Scores", "sentence_transformers.cross_encoder.modules.LogitScore")], {}, None),
])  # fmt: skip
def test_pooling_is_that_of_the_pooling_module(
    modules: list[tuple[str, str]], config: dict[str, Any], expected: str | None, tmp_path: Path
) -> None:
    folder = write_modules(tmp_path, modules, config)
    if expected is None:
        (folder / "config_sentence_transformers.json").write_text('{"model_type": "CrossEncoder"}')
    assert choose_pooling(None, None, folder) == expected
    assert is_embedding_model(folder) == (expected is not None)


@pytest.mark.parametrize(("modules", "config", "words"), [
    ([TRANSFORMER, POOLING, DENSE], MEAN, ("modules.json: ", "Dense")),
    ([("", "sentence_transformers.models.StaticEmbedding")], {}, ("modules.json: ", "StaticEmbedding")),
    ([("", "my_code.Transformer"), POOLING], MEAN, ("modules.json: ", "my_code.Transformer")),
    ([TRANSFORMER, POOLING], {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, ("max_tokens",)),
    ([TRANSFORMER, POOLING], {"pooling_mode": ["cls", "mean"]}, ("cls and mean",)),
    ([TRANSFORMER, POOLING], MEAN | {"include_prompt": False}, ("include_prompt",)),
])  # fmt: skip
def test_unsupported_modules_are_errors(
    modules: list[tuple[str, str]], config: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    """`pooling` replaces the pooling of the model, but no other module."""
    folder = write_modules(tmp_path, modules, config)
    with pytest.raises(UserError) as error:
        choose_pooling(None, folder)
    assert all(word in str(error.value) for word in words)
    if "modules.json" in words[0]:
        with pytest.raises(UserError, match="modules.json"):
            choose_pooling("mean", folder)
    else:
        assert choose_pooling("mean", folder) == "mean"


def test_copy_has_all_modules_and_no_other_directory(tmp_path: Path) -> None:
    modules = [
        ("0_Transformer", TRANSFORMER[1]),
        POOLING,
        ("parts/2_Dense", DENSE[1]),
        NORMALIZE,
        ("../outside", "sentence_transformers.models.Normalize"),
    ]
    source = write_modules(tmp_path / "a" / "source", modules, MEAN)
    (source / "parts" / "2_Dense" / "model.safetensors").write_bytes(b"weights")
    (source / "2_Normalize" / "config.json").unlink()
    (source / "2_Normalize").rmdir()
    target = tmp_path / "b" / "target"
    target.mkdir(parents=True)
    copy_modules(source, target)
    assert (target / "parts" / "2_Dense" / "model.safetensors").read_bytes() == b"weights"
    assert json.loads((target / "1_Pooling" / "config.json").read_text()) == MEAN
    assert not (tmp_path / "b" / "outside").exists() and not (target / "0_Transformer").exists()


@pytest.mark.parametrize("text", ['{"a": 1}', '[{"type": "sentence_transformers.models.Pooling"}]', "[1]"])
def test_broken_list_of_modules_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(UserError, match="modules.json: must be a list"):
        is_embedding_model(tmp_path)


def test_score_head_replaces_modules_after_the_transformer(tmp_path: Path) -> None:
    """Scores of a language model by its `yes` and `no` tokens do not apply to a model with a score head."""
    folder = make_checkpoint(tmp_path / "model", "llama3.2")
    logit_score = ("1_LogitScore", "sentence_transformers.cross_encoder.modules.logit_score.LogitScore")
    for modules, is_skipped in (([TRANSFORMER], False), ([TRANSFORMER, logit_score], True)):
        entries = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(modules)]
        (folder / "modules.json").write_text(json.dumps(entries))
        scored = with_score_head(HFCheckpoint.open(folder), ScoreHead(labels=1, pad_token_id=0))
        assert ("modules.json" in unrelated_files(scored)) == is_skipped
