"""Training from scratch with the config.json of a preset and the tokenizer of another model."""

import json
from pathlib import Path

import pytest
import transformers

from tunekit import assets, build
from tunekit.checkpoint.hf_checkpoint import WEIGHTS
from tunekit.data.tokenizer import Tokenizer

RUN = ("run", "sft", "sft.yaml", "model=tunekit/tiny", "max_steps=2", "eval_every=2")
NANO_TOKENIZER = "tokenizer=tunekit/nano"


@pytest.fixture
def preset(workspace, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tiny preset with a vocabulary that is larger than that of the tokenizer."""
    folder = workspace.folder / "tiny"
    folder.mkdir()
    config = json.loads((workspace.model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 100}))
    monkeypatch.setitem(assets.PRESETS, "tunekit/tiny", folder)
    return folder


def test_training_from_scratch_saves_model_and_tokenizer(workspace, preset: Path) -> None:
    result = workspace.run_tune(*RUN, NANO_TOKENIZER, "init=random", "output_dir=one")
    assert result.code == 0, result.err
    final, nano = workspace.folder / "one/final", assets.MODELS["tunekit/nano"]
    assert (final / WEIGHTS).is_file()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (final / name).read_bytes() == (nano / name).read_bytes()
    _, _, tokenizer = build.resolve_model(str(final))
    text = "What is 1 plus 1?"
    assert tokenizer.encode(text) == Tokenizer.open(nano).encode(text)
    theirs = transformers.AutoTokenizer.from_pretrained(final)
    assert theirs(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text)
    transformers.AutoModelForCausalLM.from_pretrained(final)


def test_adapter_is_saved_with_its_tokenizer(workspace, preset: Path) -> None:
    adapter = "adapter={kind: lora, rank: 2, alpha: 4}"
    result = workspace.run_tune(*RUN, NANO_TOKENIZER, "init=random", "output_dir=two", adapter)
    assert result.code == 2
    assert "init: random" in result.err
    result = workspace.run_tune(*RUN, NANO_TOKENIZER, f"model={workspace.model}", "output_dir=two", adapter)
    assert result.code == 0, result.err
    names = {file.name for file in (workspace.folder / "two/final").iterdir()}
    assert {"adapter_config.json", "tokenizer.json", "chat_template.jinja"} <= names
    assert "config.json" not in names


@pytest.mark.parametrize(("args", "expected"), [
    ((NANO_TOKENIZER,), "init"),
    (("init=random",), "tokenizer.json"),
    (("init=random", "tokenizer=tunekit/nanoo"), "tunekit/nano?"),
    (("init=random", "tokenizer=./nowhere"), "./nowhere"),
])  # fmt: skip
def test_missing_weights_and_tokenizers_are_one_line_errors(
    args: tuple[str, ...], expected: str, workspace, preset: Path
) -> None:
    result = workspace.run_tune(*RUN, *args, "output_dir=three")
    assert result.code == 2
    assert expected in result.err
    assert len(result.err.strip().splitlines()) <= 2, result.err


def test_tokenizer_larger_than_the_model_is_an_error(workspace, preset: Path) -> None:
    config = preset / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 20}))
    result = workspace.run_tune(*RUN, NANO_TOKENIZER, "init=random", "output_dir=three")
    assert result.code == 2
    assert "tokenizer" in result.err
