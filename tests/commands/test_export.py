"""`tune export` from the command line."""

import importlib
from pathlib import Path

import gguf
import pytest

from tests.checkpoints import load_model, rewrite_config, shuffle_adapter
from tests.export.exported import SUPPORTED, make_checkpoint, regex_pre_tokenizer, write_byte_level_bpe
from tunekit.adapters.config import LoRAConfig
from tunekit.checkpoint import peft_adapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.cli import main as cli
from tunekit.export.pretokenizer import QWEN2


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_byte_level_bpe(
        make_checkpoint(tmp_path / "small", SUPPORTED["qwen3"] | {"vocab_size": 448}), regex_pre_tokenizer(QWEN2)
    )


def test_it_says_what_was_written_and_how_far_it_is_off(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "small.gguf"
    assert cli.main(["export", str(model), str(out)]) == 0
    told = capsys.readouterr()
    assert told.out == f"{out}\n"
    size, tensors, *_, verdict = told.err.splitlines()
    assert size.startswith("f32, ")  # as the model is stored
    assert tensors == "35 tensors in F32: exact"
    assert verdict.startswith("verified: model and exported files give the same logits")
    fields = gguf.GGUFReader(out).fields
    assert fields["general.name"].contents() == "small"
    assert fields["general.architecture"].contents() == "qwen3"
    assert cli.main(["export", str(model), str(out)]) == 2
    assert capsys.readouterr().err == f"error: {out} is there already: give another name\n"


def test_an_adapter_is_merged(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = LoRAConfig(3, target_modules=("all-linear",))
    net = load_model(model, adapter)
    shuffle_adapter(net)
    beside = tmp_path / "adapter"
    beside.mkdir()
    peft_adapter.save_adapter(beside, net, adapter, HFCheckpoint.open(model))
    assert cli.main(["export", str(beside), str(tmp_path / "a.gguf"), "--type", "bf16"]) == 0
    assert "\nverified: " in capsys.readouterr().err


def test_a_file_that_is_too_far_off_stays_and_is_a_failure(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = SUPPORTED["qwen3"] | {"vocab_size": 448, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    make_checkpoint(tmp_path / "wide", wide)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "wide" / file).write_bytes((model / file).read_bytes())
    out = tmp_path / "wide.gguf"
    assert cli.main(["export", str(tmp_path / "wide"), str(out), "--type", "tq1_0"]) == 2
    assert out.is_file()
    told = capsys.readouterr().err
    assert f"error: {out}: verification failed: logits of model and exported files differ by" in told
    assert told.endswith("; the file stays there, to be looked at\n")


def test_mistakes_are_told_in_a_line(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "x.gguf")
    assert cli.main(["export", str(model), out, "--type", "q4_k_m"]) == 2
    assert "the gguf package cannot write this type" in capsys.readouterr().err
    rewrite_config(model, lambda c: c | {"hidden_act": "gelu"})
    assert cli.main(["export", str(model), out]) == 2
    told = capsys.readouterr().err
    assert (
        told == f"error: {model}: llama.cpp's qwen3 cannot run this model: layers.0.ffn.act is gelu, and there silu\n"
    )
    assert not Path(out).exists()


def test_without_the_extra_it_is_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.import_module

    def without(name: str) -> object:
        if name == "tunekit.export.gguf_export":
            raise ModuleNotFoundError("No module named 'gguf'", name="gguf")
        return real(name)

    monkeypatch.setattr(importlib, "import_module", without)
    assert cli.main(["export", str(model), str(tmp_path / "x.gguf")]) == 2
    told = (
        "error: gguf is not installed, which every --type but nf4, nf4-double-quant, fp4, fp4-double-quant "
        "needs: pip install "
    )
    assert capsys.readouterr().err == f"{told}'tunekit[gguf]'\n"
