"""Training from scratch what only a config.json describes, with the tokenizer of another model."""

import json
from pathlib import Path

import pytest
import transformers

from tunekit import assets, build
from tunekit.checkpoint.hf_checkpoint import WEIGHTS
from tunekit.data.tokenizer import Tokenizer

RUN = ("run", "sft", "sft.yaml", "model=tunekit/tiny", "max_steps=2", "eval_every=2")
NANO = "tokenizer=tunekit/nano"


@pytest.fixture
def preset(work, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A preset, as small as the checkpoint of these tests; its vocabulary is larger than that of any tokenizer here."""
    folder = work.folder / "tiny"
    folder.mkdir()
    config = json.loads((work.model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 100}))
    monkeypatch.setitem(assets.PRESETS, "tunekit/tiny", folder)
    return folder


def test_from_scratch(work, preset: Path) -> None:
    done = work.tune(*RUN, NANO, "init=random", "output_dir=one")
    assert done.code == 0, done.err
    final, nano = work.folder / "one/final", assets.MODELS["tunekit/nano"]
    assert (final / WEIGHTS).is_file()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (final / name).read_bytes() == (nano / name).read_bytes()
    _, _, tokenizer = build.resolve_model(str(final))
    text = "What is 1 plus 1?"
    assert tokenizer.encode(text) == Tokenizer.open(nano).encode(text)
    theirs = transformers.AutoTokenizer.from_pretrained(final)
    assert theirs(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text)
    transformers.AutoModelForCausalLM.from_pretrained(final)


def test_an_adapter_goes_with_the_tokenizer_it_was_trained_on(work, preset: Path) -> None:
    adapter = "adapter={kind: lora, rank: 2, alpha: 4}"
    done = work.tune(*RUN, NANO, "init=random", "output_dir=two", adapter)
    assert done.code == 2
    assert "init: random weights under an adapter are kept nowhere" in done.err
    done = work.tune(*RUN, NANO, f"model={work.model}", "output_dir=two", adapter)
    assert done.code == 0, done.err
    held = {file.name for file in (work.folder / "two/final").iterdir()}
    assert {"adapter_config.json", "tokenizer.json", "chat_template.jinja"} <= held
    assert "config.json" not in held


@pytest.mark.parametrize(("words", "told"), [
    ((NANO,), "so there are no weights to read (init: random needs none)"),
    (("init=random",), "no tokenizer.json; fetch the checkpoint's, train with another's (`tokenizer`)"),
    (("init=random", "tokenizer=tunekit/nanoo"), "no bundled model tunekit/nanoo: did you mean tunekit/nano?"),
    (("init=random", "tokenizer=./nowhere"), "no such folder: ./nowhere"),
])  # fmt: skip
def test_what_is_missing_is_told_in_a_line(words: tuple[str, ...], told: str, work, preset: Path) -> None:
    done = work.tune(*RUN, *words, "output_dir=three")
    assert done.code == 2
    assert told in done.err
    assert len(done.err.strip().splitlines()) <= 2, done.err


def test_a_tokenizer_that_is_too_large(work, preset: Path) -> None:
    config = preset / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 20}))
    done = work.tune(*RUN, NANO, "init=random", "output_dir=three")
    assert done.code == 2
    assert "and its model 20: the tokenizer is another model's" in done.err
