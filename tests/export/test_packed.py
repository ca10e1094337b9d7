"""Models written in four bits: transformers opens them with bitsandbytes, and so do we, to the same numbers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints import FP32, PLAINLY, SHAPES, auto, build, error, save, shuffle_adapter, tokens
from tests.test_formats import FAMILIES, WIDE
from tunekit import build as assemble
from tunekit.adapters.config import FrozenModel, LoRAConfig
from tunekit.checkpoint import peft_adapter
from tunekit.checkpoint.hf_checkpoint import INDEX, WEIGHTS, HFCheckpoint
from tunekit.cli import main as cli
from tunekit.distributed.context import DistributedContext
from tunekit.export.bitsandbytes_export import TYPES
from tunekit.models.decoder import Decoder
from tunekit.quantization.config import NF4Config, NoQuantization, QuantizedLinear

MODELS = FAMILIES | {"phi3": SHAPES["phi3"] | WIDE}


def ours(folder: Path, weights: NoQuantization) -> Decoder:
    """The model of a folder, its weights stored in some way."""
    return assemble.build_model(
        HFCheckpoint.open(folder), weights, FrozenModel(), FP32, PLAINLY, DistributedContext(0, "cpu")
    )


def exported(source: Path, out: Path, word: str) -> Path:
    assert cli.main(["export", str(source), str(out), "--type", word]) == 0
    return out


@pytest.mark.parametrize(("name", "word"), [
    ("llama", "nf4"), ("llama", "nf4-double-quant"), ("llama", "fp4"), ("llama", "fp4-double-quant"),
    ("qwen3-moe", "nf4"), ("gpt-oss", "nf4"), ("qwen3-next", "nf4"), ("phi3", "nf4"),
])  # fmt: skip
def test_what_is_written_is_the_packed_model(name: str, word: str, tmp_path: Path, capsys) -> None:
    source, weights = save(build(MODELS[name]).bfloat16(), tmp_path / "plain"), TYPES[word]
    out = exported(source, tmp_path / "packed", word)
    told = capsys.readouterr()
    assert told.out == f"{out}\n"
    assert "verified: model in four bits and files give the same logits to the last bit" in told.err
    packed, again = ours(source, weights), ours(out, replace(weights, double_quant=False))
    layers = {name: layer for name, layer in packed.named_modules() if isinstance(layer, QuantizedLinear)}
    assert layers
    for key, layer in layers.items():
        assert torch.equal(layer.dense(), again.get_submodule(key).dense())
        if weights.kind == "nf4":  # a float of four bits has two zeros
            assert torch.equal(layer.packed, again.get_submodule(key).packed)
    for key, tensor in packed.state_dict().items():
        if key.rpartition(".")[0] not in layers:
            assert torch.equal(tensor, again.state_dict()[key]), key
    method = json.loads((out / "config.json").read_text())["quantization_config"]
    assert method["bnb_4bit_quant_type"] == weights.kind and "lm_head" in method["llm_int8_skip_modules"]
    assert (out / WEIGHTS).stat().st_size < (source / WEIGHTS).stat().st_size


def theirs(folder: Path) -> torch.nn.Module:
    """As transformers reads it; while they are trained, layers of bitsandbytes work as on a GPU."""
    pytest.importorskip("bitsandbytes")
    kind = auto(json.loads((folder / "config.json").read_text()))
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").train()


@pytest.mark.parametrize(("name", "word"), [
    ("llama", "nf4"), ("llama", "nf4-double-quant"), ("llama", "fp4"), ("qwen3-moe", "nf4"), ("qwen3-next", "nf4"),
    ("phi3", "nf4-double-quant"),
])  # fmt: skip
def test_transformers_opens_it_with_bitsandbytes(name: str, word: str, tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    source, weights = save(build(MODELS[name]), tmp_path / "plain"), TYPES[word]
    out = exported(source, tmp_path / "packed", word)
    model, packed = theirs(out), ours(source, weights)
    count = sum(isinstance(layer, QuantizedLinear) for layer in packed.modules())
    linears = {n: m for n, m in model.named_modules() if type(m).__name__ == "Linear4bit"}
    assert linears and (len(linears) == count or name == "phi3")
    with HFCheckpoint.open(out).reader() as tensors:
        for key, layer in linears.items():
            wanted = functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            assert torch.equal(tensors[f"{key}.weight"], wanted)
    with torch.no_grad():
        logits = model(tokens()).logits
        assert error(logits, ours(out, NoQuantization())(tokens())) < 1e-5
        if name == "llama":  # nothing is packed here and plain there
            assert error(logits, packed(tokens())) < 1e-5


def test_an_adapter_is_merged_and_shards_stay(tmp_path: Path) -> None:
    source = save(build(FAMILIES["llama"]), tmp_path / "base", max_shard_size="100KB")
    adapter, beside = LoRAConfig(4), tmp_path / "adapter"
    model = assemble.build_model(
        HFCheckpoint.open(source), TYPES["nf4"], adapter, FP32, PLAINLY, DistributedContext(0, "cpu")
    )
    shuffle_adapter(model)
    beside.mkdir()
    peft_adapter.save_adapter(beside, model, adapter, HFCheckpoint.open(source))
    out = exported(beside, tmp_path / "packed", "nf4")
    merged = tmp_path / "merged"
    assert cli.main(["merge", str(source), str(beside), str(merged)]) == 0
    for one, other in zip(ours(merged, NF4Config()).parameters(), ours(out, NF4Config()).parameters(), strict=True):
        assert torch.equal(one, other)
    listed = json.loads((out / INDEX).read_text())["weight_map"]
    assert len(set(listed.values())) > 1
    assert {name: file for file in set(listed.values()) for name in load_file(out / file)}.keys() == listed.keys()
    with torch.no_grad():
        assert error(theirs(out)(tokens()).logits, ours(out, NF4Config())(tokens())) < 3e-5


def test_a_packed_checkpoint_is_written_again_to_the_same_bytes(tmp_path: Path) -> None:
    source = save(build(FAMILIES["llama"]).bfloat16(), tmp_path / "plain")
    first = exported(source, tmp_path / "first", "nf4")
    second = exported(first, tmp_path / "second", "nf4")
    one, other = (load_file(folder / WEIGHTS) for folder in (first, second))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
