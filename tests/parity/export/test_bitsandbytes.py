"""Models exported in 4 bits are opened by transformers with bitsandbytes and by tunekit, with the same values."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.random_checkpoints import (
    DEFAULT_MEMORY,
    FP32,
    SHAPES,
    auto_class,
    build,
    random_tokens,
    relative_error,
    save,
    shuffle_adapter,
)
from tests.unit.quantization.test_quantized_models import BLOCK_SIZES, FAMILIES
from tunekit import build as assemble
from tunekit.adapters.config import FrozenModel, LoRAConfig
from tunekit.checkpoint import peft_adapter
from tunekit.checkpoint.hf_checkpoint import INDEX, WEIGHTS, HFCheckpoint
from tunekit.cli import main as cli
from tunekit.distributed.context import DistributedContext
from tunekit.export.bitsandbytes_export import TYPES
from tunekit.models.decoder import Decoder
from tunekit.quantization.config import NF4Config, NoQuantization, QuantizedLinear

MODELS = FAMILIES | {"phi3": SHAPES["phi3"] | BLOCK_SIZES}


def open_model(directory: Path, quantization: NoQuantization) -> Decoder:
    """Build the model of a directory with the given quantization."""
    return assemble.build_model(
        HFCheckpoint.open(directory), quantization, FrozenModel(), FP32, DEFAULT_MEMORY, DistributedContext(0, "cpu")
    )


def export_model(source: Path, out: Path, quant_type: str) -> Path:
    assert cli.main(["export", str(source), str(out), "--type", quant_type]) == 0
    return out


@pytest.mark.parametrize(("name", "quant_type"), [
    ("llama", "nf4"), ("llama", "nf4-double-quant"), ("llama", "fp4"), ("llama", "fp4-double-quant"),
    ("qwen3-moe", "nf4"), ("gpt-oss", "nf4"), ("qwen3-next", "nf4"), ("phi3", "nf4"),
])  # fmt: skip
def test_exported_model_equals_quantized_model(name: str, quant_type: str, tmp_path: Path, capsys) -> None:
    source, quantization = save(build(MODELS[name]).bfloat16(), tmp_path / "plain"), TYPES[quant_type]
    out = export_model(source, tmp_path / "packed", quant_type)
    output = capsys.readouterr()
    assert output.out == f"{out}\n"
    assert "verified" in output.err
    quantized, reopened = open_model(source, quantization), open_model(out, replace(quantization, double_quant=False))
    layers = {name: layer for name, layer in quantized.named_modules() if isinstance(layer, QuantizedLinear)}
    assert layers
    for key, layer in layers.items():
        assert torch.equal(layer.dequantize(), reopened.get_submodule(key).dequantize())
        if quantization.kind == "nf4":  # fp4 has two zeros
            assert torch.equal(layer.quantized_weight, reopened.get_submodule(key).quantized_weight)
    for key, tensor in quantized.state_dict().items():
        if key.rpartition(".")[0] not in layers:
            assert torch.equal(tensor, reopened.state_dict()[key]), key
    method = json.loads((out / "config.json").read_text())["quantization_config"]
    assert method["bnb_4bit_quant_type"] == quantization.kind and "lm_head" in method["llm_int8_skip_modules"]
    assert (out / WEIGHTS).stat().st_size < (source / WEIGHTS).stat().st_size


def open_with_transformers(directory: Path) -> torch.nn.Module:
    """Open with transformers in training mode, in which bitsandbytes layers compute as on a GPU."""
    pytest.importorskip("bitsandbytes")
    kind = auto_class(json.loads((directory / "config.json").read_text()))
    return kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").train()


@pytest.mark.parametrize(("name", "quant_type"), [
    ("llama", "nf4"), ("llama", "nf4-double-quant"), ("llama", "fp4"), ("qwen3-moe", "nf4"), ("qwen3-next", "nf4"),
    ("phi3", "nf4-double-quant"),
])  # fmt: skip
def test_transformers_opens_the_export_with_bitsandbytes(name: str, quant_type: str, tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    source, quantization = save(build(MODELS[name]), tmp_path / "plain"), TYPES[quant_type]
    out = export_model(source, tmp_path / "packed", quant_type)
    model, quantized = open_with_transformers(out), open_model(source, quantization)
    count = sum(isinstance(layer, QuantizedLinear) for layer in quantized.modules())
    linears = {n: m for n, m in model.named_modules() if type(m).__name__ == "Linear4bit"}
    assert linears and (len(linears) == count or name == "phi3")
    with HFCheckpoint.open(out).reader() as tensors:
        for key, layer in linears.items():
            expected = functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            assert torch.equal(tensors[f"{key}.weight"], expected)
    with torch.no_grad():
        logits = model(random_tokens()).logits
        assert relative_error(logits, open_model(out, NoQuantization())(random_tokens())) < 1e-5
        if name == "llama":  # no layer is quantized in only one of the two
            assert relative_error(logits, quantized(random_tokens())) < 1e-5


def test_adapter_is_merged_and_shards_are_kept(tmp_path: Path) -> None:
    source = save(build(FAMILIES["llama"]), tmp_path / "base", max_shard_size="100KB")
    adapter, adapter_dir = LoRAConfig(4), tmp_path / "adapter"
    model = assemble.build_model(
        HFCheckpoint.open(source), TYPES["nf4"], adapter, FP32, DEFAULT_MEMORY, DistributedContext(0, "cpu")
    )
    shuffle_adapter(model)
    adapter_dir.mkdir()
    peft_adapter.save_adapter(adapter_dir, model, adapter, HFCheckpoint.open(source))
    out = export_model(adapter_dir, tmp_path / "packed", "nf4")
    merged = tmp_path / "merged"
    assert cli.main(["merge", str(source), str(adapter_dir), str(merged)]) == 0
    for expected, actual in zip(
        open_model(merged, NF4Config()).parameters(), open_model(out, NF4Config()).parameters(), strict=True
    ):
        assert torch.equal(expected, actual)
    weight_map = json.loads((out / INDEX).read_text())["weight_map"]
    assert len(set(weight_map.values())) > 1
    assert {
        name: file for file in set(weight_map.values()) for name in load_file(out / file)
    }.keys() == weight_map.keys()
    with torch.no_grad():
        assert (
            relative_error(
                open_with_transformers(out)(random_tokens()).logits, open_model(out, NF4Config())(random_tokens())
            )
            < 3e-5
        )


def test_exporting_a_quantized_checkpoint_gives_the_same_bytes(tmp_path: Path) -> None:
    source = save(build(FAMILIES["llama"]).bfloat16(), tmp_path / "plain")
    first = export_model(source, tmp_path / "first", "nf4")
    second = export_model(first, tmp_path / "second", "nf4")
    first_tensors, second_tensors = (load_file(directory / WEIGHTS) for directory in (first, second))
    assert first_tensors.keys() == second_tensors.keys() and all(
        torch.equal(first_tensors[name], second_tensors[name]) for name in first_tensors
    )
