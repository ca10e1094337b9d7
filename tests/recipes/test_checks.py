"""What is told before a weight is read: limits of the recipe's numbers, models and adapters that do not fit."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import made, ours
from tunekit import assemble, bundled, launch
from tunekit.adapters import LoRA
from tunekit.checkpoint import atomic, save
from tunekit.checkpoint.folder import Folder
from tunekit.commands import process
from tunekit.data.rows import Chat
from tunekit.errors import FieldError, UserError
from tunekit.formats import Plain
from tunekit.parallel.run import Run
from tunekit.recipes import evaluate, generate, sft


@pytest.mark.parametrize(
    ("name", "value"), [("steps", 0), ("steps", -3), ("patience", 0), ("clip", -1.0), ("epochs", 0)]
)
def test_numbers_that_make_no_sense(name: str, value: float) -> None:
    rows = Chat("rows.jsonl")
    options: dict[str, Any] = {"model": "m", "data": rows, "out": "o", "validation": rows, name: value}
    with pytest.raises(FieldError) as caught:
        sft.SFT(**options)
    assert caught.value.field == name


def test_an_adapter_to_start_from_is_looked_at_before_weights(tmp_path: Path) -> None:
    base, adapter = made(tmp_path / "base", "llama2"), LoRA(2)
    with atomic.whole(tmp_path / "adapter") as folder:
        save.final(adapter, folder, ours(base, adapter), Folder.open(base))
    (base / "model.safetensors").unlink()
    fits = LoRA(2, start=str(tmp_path / "adapter"))
    assemble.outline(Folder.open(base), Plain(), fits)
    for start, rank, says in [("nowhere", 2, "nowhere"), ("adapter", 3, "adapter.rank: 3, but"), ("base", 2, "base")]:
        with pytest.raises(UserError, match=re.escape(says)):
            assemble.outline(Folder.open(base), Plain(), LoRA(rank, start=str(tmp_path / start)))


def test_models_to_ask_are_looked_at_before_weights(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text(json.dumps({"model_type": "lama"}))
    data = "data={kind: chat, source: tunekit/tools}"
    for name, says in [("empty", "no config.json"), ("other", "did you mean 'llama'?")]:
        model = f"model={tmp_path / name}"
        with pytest.raises(UserError, match=re.escape(says)):
            launch.config(generate, "nano/generate", [model], [])
        with pytest.raises(UserError, match=re.escape(says)):
            launch.config(evaluate, "nano/tools", ["model=tunekit/nano", f"baseline={tmp_path / name}", data], [])


def test_weights_that_are_not_whole_are_told_before_rows_are_read(tmp_path: Path) -> None:
    folder = made(tmp_path / "model", "llama2")
    options = [f"model={folder}", f"tokenizer={bundled.MODELS['tunekit/nano']}", f"out={tmp_path / 'out'}"]
    options += ["data={kind: text, source: nowhere.txt}", "validation=null"]
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for data, says in [(whole[:-8], "cut off"), (None, "no weights to read")]:
        file.unlink()
        if data is not None:
            file.write_bytes(data)
        with pytest.raises(UserError, match=says):
            launch.config(sft, "nano/tools_lora", options, [])


def test_a_preset_is_no_model_to_go_on_with() -> None:
    options = ["model=tunekit/smollm2_135m", "tokenizer=tunekit/nano"]
    with pytest.raises(UserError, match="no weights to read .init: random needs none"):
        launch.config(sft, "nano/tools_lora", options, [])
    with pytest.raises(UserError, match="no tokenizer.json"):
        launch.config(sft, "nano/tools_lora", [*options[:1], "init=random", "adapter=full"], [])


def test_a_seed_has_64_bits() -> None:
    assert launch.config(sft, "nano/tools_lora", [f"seed={2**63 - 1}"], []).seed == 2**63 - 1
    with pytest.raises(UserError, match=f"seed: .*got {2**63}; the largest is {2**63 - 1}"):
        launch.config(sft, "nano/tools_lora", [f"seed={2**63}"], [])


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Run(device="auto").device.type == "cpu"
    with pytest.raises(UserError, match="device: .* finds no device of type cuda"):
        Run(device="cuda")


def test_starting_over_keeps_what_the_run_reads(tmp_path: Path) -> None:
    final = tmp_path / "final"
    final.mkdir()
    (tmp_path / "config.yaml").touch()
    rows = Chat("rows.jsonl")
    for cfg in (
        sft.SFT(model=str(final), data=rows, out=str(tmp_path)),
        sft.SFT(model="m", data=rows, out=str(tmp_path), adapter=LoRA(start=f"{final}")),
    ):
        with pytest.raises(UserError, match="would erase .*final, which this run reads"):
            process.check_fresh(sft, cfg)
        assert final.is_dir()
    process.check_fresh(sft, sft.SFT(model="m", data=rows, out=str(tmp_path)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="auto is a GPU here")
def test_what_only_a_gpu_can_do_is_refused_where_there_is_none() -> None:
    for device in ("cpu", "auto"):
        with pytest.raises(UserError, match="memory.offload: "):
            launch.config(sft, "nano/tools_lora", ["memory.offload=true", f"device={device}"], [])
    cfg = launch.config(sft, "nano/tools_lora", ["memory.offload=true", "device=cuda"], [])
    assert cfg.memory.offload, "checked here, and run where there is one"
