"""`tune export` on the command line."""

import importlib
import shutil
from pathlib import Path

import gguf
import pytest

from tests.helpers.gguf_models import SUPPORTED, make_checkpoint, regex_pre_tokenizer, write_byte_level_bpe
from tests.helpers.random_checkpoints import load_model, rewrite_config, shuffle_adapter
from tunekit.adapters.config import LoRAConfig
from tunekit.checkpoint import peft_adapter
from tunekit.checkpoint.atomic import AtomicDir
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.cli import main as cli
from tunekit.export.pretokenizer import QWEN2


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_byte_level_bpe(
        make_checkpoint(tmp_path / "small", SUPPORTED["qwen3"] | {"vocab_size": 448}), regex_pre_tokenizer(QWEN2)
    )


def test_export_reports_size_and_verification(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "small.gguf"
    assert cli.main(["export", str(model), str(out)]) == 0
    output = capsys.readouterr()
    assert output.out == f"{out}\n"
    size, tensors, *_, verdict = output.err.splitlines()
    assert size.startswith("f32, ")  # the dtype of the checkpoint
    assert tensors == "35 tensors in F32: exact"
    assert verdict.startswith("verified: model and exported files give the same logits")
    fields = gguf.GGUFReader(out).fields
    assert fields["general.name"].contents() == "small"
    assert fields["general.architecture"].contents() == "qwen3"
    assert cli.main(["export", str(model), str(out)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {out}")


def test_adapter_is_merged_before_export(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = LoRAConfig(3, target_modules=("all-linear",))
    decoder = load_model(model, adapter)
    shuffle_adapter(decoder)
    adapter_dir = tmp_path / "adapter"
    adapter_dir.mkdir()
    peft_adapter.save_adapter(adapter_dir, decoder, adapter, HFCheckpoint.open(model))
    assert cli.main(["export", str(adapter_dir), str(tmp_path / "a.gguf"), "--type", "bf16"]) == 0
    assert "\nverified: " in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["f32", "nf4"])
def test_weights_that_changed_since_a_run_saved_them_are_rejected(
    kind: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with AtomicDir(tmp_path / "final") as directory:
        shutil.copytree(model, directory, dirs_exist_ok=True)
    weights = tmp_path / "final/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert cli.main(["export", str(tmp_path / "final"), str(tmp_path / "out"), "--type", kind]) == 2
    err = capsys.readouterr().err
    assert str(weights) in err and "checksum" in err and not (tmp_path / "out").exists()


def test_failed_verification_keeps_the_file_and_exits_with_2(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = SUPPORTED["qwen3"] | {"vocab_size": 448, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    make_checkpoint(tmp_path / "wide", wide)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "wide" / file).write_bytes((model / file).read_bytes())
    out = tmp_path / "wide.gguf"
    assert cli.main(["export", str(tmp_path / "wide"), str(out), "--type", "tq1_0"]) == 2
    assert out.is_file()
    err = capsys.readouterr().err
    assert f"error: {out}: verification failed: logits of model and exported files differ by" in err
    assert err.splitlines()[-1].startswith("error: ")


def test_unsupported_models_and_types_are_one_line_errors(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "x.gguf")
    assert cli.main(["export", str(model), out, "--type", "q4_k_m"]) == 2
    assert "the gguf package cannot write this type" in capsys.readouterr().err
    rewrite_config(model, lambda c: c | {"hidden_act": "gelu"})
    assert cli.main(["export", str(model), out]) == 2
    err = capsys.readouterr().err
    assert (
        err
        == f"error: {model}: llama.cpp's qwen3 cannot run this model: layers.0.ffn.act is gelu, but silu in llama.cpp\n"
    )
    assert not Path(out).exists()


def test_missing_gguf_package_names_the_extra(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = importlib.import_module

    def import_without_gguf(name: str) -> object:
        if name == "tunekit.export.gguf_export":
            raise ModuleNotFoundError("No module named 'gguf'", name="gguf")
        return original(name)

    monkeypatch.setattr(importlib, "import_module", import_without_gguf)
    assert cli.main(["export", str(model), str(tmp_path / "x.gguf")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and "'tunekit[gguf]'" in err and err.count("\n") == 1
