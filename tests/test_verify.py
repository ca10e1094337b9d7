"""Files that are what was meant pass, in every dtype; files with a mistake in them do not."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import FP32, FULL, SHAPES, VOCAB, build, made, ours, rewrite, save, shuffle_adapter, train
from tunekit import bundled, verify
from tunekit.adapters import DoRA, Frozen, Full, LoRA
from tunekit.checkpoint import save as saving
from tunekit.checkpoint.folder import Folder
from tunekit.checkpoint.write import write
from tunekit.errors import UserError
from tunekit.formats import Plain
from tunekit.models.decoder import Decoder
from tunekit.models.linear import Linear
from tunekit.precision import Precision

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BF16 = Precision("bf16")


def trained(folder: Path, name: str, dtype: torch.dtype, adapter: Full | LoRA = FULL) -> tuple[Decoder, Folder]:
    """A model after some steps, and the checkpoint of that dtype which it came from."""
    base = save(build(SHAPES[name]).to(dtype), folder / "base")
    model = ours(base, adapter, Precision("fp32"))
    train(model, adapter)
    return model, Folder.open(base)


def written(folder: Path, model: Decoder, source: Folder, adapter: Full | LoRA = FULL) -> Path:
    out = folder / "final"
    out.mkdir()
    saving.final(adapter, out, model, source)
    return out


def found(out: Path, model: Decoder, source: Folder, precision: Precision = FP32) -> verify.Verification:
    return verify.saved(out, model, source, precision, CPU, Plain())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_a_model_that_was_saved_passes(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, source = trained(tmp_path, name, dtype)
    result = found(written(tmp_path, model, source), model, source, BF16)
    assert result.passed, result
    assert (result.mean == 0) == (dtype == torch.float32), "fp32 holds what was trained, the others are rounded"


@pytest.mark.parametrize("adapter", [
    LoRA(4, 8.0),
    LoRA(4, rslora=True, targets=("q_proj", "embed", "head")),
    LoRA(4, init="pissa"),
    DoRA(3, targets=("attn", "head")),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
def test_an_adapter_that_was_saved_passes(adapter: LoRA, precision: Precision, tmp_path: Path) -> None:
    base = save(build(SHAPES["llama3.2"]).bfloat16(), tmp_path / "base")
    model, source = ours(base, adapter, precision), Folder.open(base)
    train(model, adapter)
    result = found(written(tmp_path, model, source, adapter), model, source, precision)
    assert result.passed, result
    assert result.tolerance == verify.FINEST, "adapters are written as they were trained"
    assert (result.mean == 0) == (adapter.init != "pissa")


def changed(file: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """A safetensors file with a mistake in it."""
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})


def swapped(one: str, other: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if one in name]:
            twin = name.replace(one, other)
            tensors[name], tensors[twin] = tensors[twin], tensors[name]

    return change


def lost(part: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        assert any(part in name for name in tensors)
        tensors.update({name: torch.zeros_like(tensor) for name, tensor in tensors.items() if part in name})

    return change


def permuted(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name][[3, 4]] = tensors[name][[4, 3]]

    return change


MISTAKES = {
    "q and k swapped": ("llama2", swapped("q_proj", "k_proj")),
    "q and k swapped in one layer": ("llama2", swapped("1.self_attn.q_proj", "1.self_attn.k_proj")),
    "gate and up swapped in one layer": ("llama2", swapped("0.mlp.gate_proj", "0.mlp.up_proj")),
    "a lost bias": ("qwen2", lost("q_proj.bias")),
    "a lost bias in one layer": ("qwen2", lost("1.self_attn.v_proj.bias")),
    "a lost bias behind attention": ("llama-biases", lost("2.self_attn.o_proj.bias")),
    "two rows of the head": ("llama2", permuted("lm_head.weight")),
    "two rows of the embedding": ("qwen3", permuted("model.embed_tokens.weight")),
    "two rows of v": ("mistral", permuted("model.layers.1.self_attn.v_proj.weight")),
    "two rows of up": ("llama3.1", permuted("model.layers.0.mlp.up_proj.weight")),
    "not a number": ("llama2", lambda tensors: tensors["model.norm.weight"][0].fill_(math.nan)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_files_is_found(mistake: str, dtype: torch.dtype, tmp_path: Path) -> None:
    name, change = MISTAKES[mistake]
    model, source = trained(tmp_path, name, dtype)
    out = written(tmp_path, model, source)
    assert found(out, model, source).passed
    changed(out / "model.safetensors", change)
    result = found(out, model, source)
    assert not result.passed, result
    result.write(out)
    assert json.loads((out / verify.FILE).read_text())["passed"] is False
    with pytest.raises(UserError, match="verification failed.* see verification.json .*push") as caught:
        result.insist(out)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "key", "value"), [
    ("llama2", "rms_norm_eps", 0.1),
    ("llama3.1", "rope_parameters", {"rope_type": "default", "rope_theta": 5e5}),
    ("mistral", "sliding_window", None),
    ("llama-gelu", "hidden_act", "silu"),
])  # fmt: skip
def test_a_mistake_in_the_config_is_found(name: str, key: str, value: object, tmp_path: Path) -> None:
    model, source = trained(tmp_path, name, torch.bfloat16)
    out = written(tmp_path, model, source)
    rewrite(out, lambda config: config | {key: value})
    assert not found(out, model, source).passed
