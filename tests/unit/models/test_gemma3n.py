"""Gemma 3n: the layout of multimodal checkpoints, whose other modules transformers cannot build without timm, tokens
outside of the per-layer vocabulary, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.random_checkpoints import SHAPES, load_model, make_checkpoint, random_tokens, rewrite_config
from tunekit.checkpoint import save_model
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.errors import UserError
from tunekit.models.families.registry import find_family

SHAPE = SHAPES["gemma3n"]


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_text_model_of_a_multimodal_checkpoint(prefix: str, tmp_path: Path) -> None:
    """It has the same logits, and all tensors are saved bit by bit: also those of other modules, and the keys and
    values that shared layers do not use."""
    folder = make_checkpoint(tmp_path, "gemma3n")
    with torch.no_grad():
        expected = load_model(folder)(random_tokens())
    text = load_file(folder / "model.safetensors")
    tensors = {prefix + name.removeprefix("model."): t for name, t in text.items() if name != "lm_head.weight"}
    tensors |= {f"model.{name}.weight": torch.randn(3, 4) for name in ("vision_tower.conv", "embed_audio.embedding")}
    last = SHAPE["num_hidden_layers"] - 1
    tensors[f"model.language_model.layers.{last}.self_attn.k_proj.weight"] = torch.randn(24, 48)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    rewrite_config(folder, lambda c: {"model_type": "gemma3n", "tie_word_embeddings": True, "text_config": c})
    model = load_model(folder)
    with torch.no_grad():
        assert torch.equal(model(random_tokens()), expected)
    (tmp_path / "written").mkdir()
    save_model.save_model(tmp_path / "written", model, HFCheckpoint.open(folder), quiet=True)
    actual = load_file(tmp_path / "written" / "model.safetensors")
    assert actual.keys() == tensors.keys()
    assert all(torch.equal(tensor, actual[name]) for name, tensor in tensors.items())
    assert json.loads((folder / "config.json").read_text())["text_config"]["model_type"] == "gemma3n_text"


def test_unknown_tokens_share_a_row_that_they_do_not_train(tmp_path: Path) -> None:
    model = load_model(make_checkpoint(tmp_path, "gemma3n"))
    known = SHAPE["vocab_size_per_layer_input"]
    model(torch.tensor([[known, known + 1, 7]])).sum().backward()
    assert model.per_layer is not None
    weight = model.per_layer.embed.weight
    assert weight.grad is not None and weight.grad.abs().sum(1).nonzero().flatten().tolist() == [7]
    rows = model.per_layer.look_up(torch.tensor([[known, known + 1, 0]]), torch.float32)
    assert torch.equal(rows[0, 0], rows[0, 2]) and torch.equal(rows[0, 1], rows[0, 2])


def test_zero_embeddings_have_finite_gradients(tmp_path: Path) -> None:
    """transformers initializes the row of the padding token to 0."""
    model = load_model(make_checkpoint(tmp_path, "gemma3n"))
    rows = random_tokens()
    rows[:, -3:] = 0
    with torch.no_grad():
        model.embed.weight[0] = 0
    model(rows)[:, :-3].square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize(("change", "error"), [
    ({"altup_active_idx": 1}, "altup_active_idx 1 is not supported"),
    ({"intermediate_size": [52] * 4}, "intermediate_size has 4 entries"),
    ({"intermediate_size": [52, 0, 52, 52, 52]}, "intermediate_size must be an integer from 1"),
    ({"activation_sparsity_pattern": [0.5]}, "activation_sparsity_pattern has 1 entries"),
    ({"num_kv_shared_layers": 4}, "num_kv_shared_layers 4: no full_attention layer"),
])  # fmt: skip
def test_invalid_configs_are_errors(change: dict, error: str) -> None:
    with pytest.raises(UserError, match=error):
        find_family(SHAPE | change, "config.json")


def test_widths_by_layer_are_refused_by_other_families() -> None:
    with pytest.raises(UserError, match="intermediate_size .*integer"):
        find_family(SHAPES["llama2"] | {"intermediate_size": [52] * 3}, "config.json")
