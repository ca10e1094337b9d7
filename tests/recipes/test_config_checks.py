"""Checks before weights are read: limits of config values, and models and adapters that do not fit."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.random_checkpoints import load_model, make_checkpoint
from tunekit import assets, build
from tunekit.adapters.config import LoRAConfig
from tunekit.checkpoint import atomic, final_checkpoint
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.cli import recipe_loader
from tunekit.cli.commands import run_worker
from tunekit.data.datasets import ChatDataset
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError, UserError
from tunekit.quantization.config import NoQuantization
from tunekit.recipes import evaluate, generate, sft


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_steps", 0), ("max_steps", -3), ("early_stopping_patience", 0), ("max_grad_norm", -1.0), ("epochs", 0)],
)
def test_invalid_numbers_name_their_field(name: str, value: float) -> None:
    rows = ChatDataset("rows.jsonl")
    options: dict[str, Any] = {"model": "m", "data": rows, "output_dir": "o", "eval_data": rows, name: value}
    with pytest.raises(FieldError) as caught:
        sft.SFTConfig(**options)
    assert caught.value.field == name


def test_initial_adapter_is_checked_before_weights_are_read(tmp_path: Path) -> None:
    base, adapter = make_checkpoint(tmp_path / "base", "llama2"), LoRAConfig(2)
    with atomic.AtomicDir(tmp_path / "adapter") as folder:
        final_checkpoint.save_final(adapter, folder, load_model(base, adapter), HFCheckpoint.open(base))
    (base / "model.safetensors").unlink()
    compatible = LoRAConfig(2, adapter_path=str(tmp_path / "adapter"))
    build.build_meta_model(HFCheckpoint.open(base), NoQuantization(), compatible)
    for name, rank, message in [("nowhere", 2, "nowhere"), ("adapter", 3, "adapter.rank: 3, but"), ("base", 2, "base")]:
        with pytest.raises(UserError, match=re.escape(message)):
            build.build_meta_model(
                HFCheckpoint.open(base), NoQuantization(), LoRAConfig(rank, adapter_path=str(tmp_path / name))
            )


def test_inference_models_are_checked_before_weights_are_read(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text(json.dumps({"model_type": "lama"}))
    data = "data={kind: chat, source: tunekit/tools}"
    for name, message in [("empty", "no config.json"), ("other", "'llama'?")]:
        model = f"model={tmp_path / name}"
        with pytest.raises(UserError, match=re.escape(message)):
            recipe_loader.load_checked_config(generate, "nano/generate", [model], [])
        with pytest.raises(UserError, match=re.escape(message)):
            recipe_loader.load_checked_config(
                evaluate, "nano/tools", ["model=tunekit/nano", f"baseline={tmp_path / name}", data], []
            )


def test_damaged_weights_are_reported_before_rows_are_read(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama2")
    options = [f"model={folder}", f"tokenizer={assets.MODELS['tunekit/nano']}", f"output_dir={tmp_path / 'out'}"]
    options += ["data={kind: text, source: nowhere.txt}", "eval_data=null"]
    file = folder / "model.safetensors"
    contents = file.read_bytes()
    for data, message in [(contents[:-8], "truncated"), (None, "init=random")]:
        file.unlink()
        if data is not None:
            file.write_bytes(data)
        with pytest.raises(UserError, match=message):
            recipe_loader.load_checked_config(sft, "nano/tools_lora", options, [])


def test_preset_has_no_weights_to_fine_tune() -> None:
    options = ["model=tunekit/smollm2_135m", "tokenizer=tunekit/nano"]
    with pytest.raises(UserError, match="no weights .*init=random"):
        recipe_loader.load_checked_config(sft, "nano/tools_lora", options, [])
    with pytest.raises(UserError, match="no tokenizer.json"):
        recipe_loader.load_checked_config(sft, "nano/tools_lora", [*options[:1], "init=random", "adapter=none"], [])


def test_seed_is_a_64_bit_integer() -> None:
    assert recipe_loader.load_checked_config(sft, "nano/tools_lora", [f"seed={2**63 - 1}"], []).seed == 2**63 - 1
    with pytest.raises(UserError, match=f"seed: .*got {2**63}; .*{2**63 - 1}"):
        recipe_loader.load_checked_config(sft, "nano/tools_lora", [f"seed={2**63}"], [])


def test_missing_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert DistributedContext(device="auto").device.type == "cpu"
    with pytest.raises(UserError, match="device: .* finds no device of type cuda"):
        DistributedContext(device="cuda")


def test_overwrite_does_not_erase_inputs_of_the_run(tmp_path: Path) -> None:
    final = tmp_path / "final"
    final.mkdir()
    (tmp_path / "config.yaml").touch()
    rows = ChatDataset("rows.jsonl")
    for cfg in (
        sft.SFTConfig(model=str(final), data=rows, output_dir=str(tmp_path)),
        sft.SFTConfig(model="m", data=rows, output_dir=str(tmp_path), adapter=LoRAConfig(adapter_path=f"{final}")),
    ):
        with pytest.raises(UserError, match="/final, "):
            run_worker.check_overwrite(sft, cfg)
        assert final.is_dir()
    run_worker.check_overwrite(sft, sft.SFTConfig(model="m", data=rows, output_dir=str(tmp_path)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="auto is a GPU here")
def test_gpu_only_options_are_refused_on_cpu() -> None:
    for device in ("cpu", "auto"):
        with pytest.raises(UserError, match="memory.activation_offloading: "):
            recipe_loader.load_checked_config(
                sft, "nano/tools_lora", ["memory.activation_offloading=true", f"device={device}"], []
            )
    cfg = recipe_loader.load_checked_config(
        sft, "nano/tools_lora", ["memory.activation_offloading=true", "device=cuda"], []
    )
    assert cfg.memory.activation_offloading, "the config is valid for a GPU machine"
