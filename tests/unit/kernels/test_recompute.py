"""Recomputed activations: the same bits with less saved memory."""

import gc
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from tests.helpers.pairwise import pairwise
from tests.helpers.random_checkpoints import load_model, make_batch, make_checkpoint, random_tokens, shuffle_adapter
from tunekit.adapters.config import DoRAConfig, LoRAConfig
from tunekit.kernels import glu, rms_norm
from tunekit.kernels.recompute import SOURCES, mark_recomputable, recompute_source
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig


def test_source_lives_as_long_as_its_result() -> None:
    x = torch.randn(3)
    y = mark_recomputable(x * 2, lambda x: x * 2, x)
    make, inputs = recompute_source(y)
    assert torch.equal(make(*inputs), y) and inputs[0] is x
    assert recompute_source(x).inputs == (x,) and recompute_source(x).make(x) is x, "an unmarked tensor"
    gc.collect()  # garbage of earlier tests would be collected at an arbitrary time
    before = len(SOURCES)
    del y
    assert len(SOURCES) == before - 1
    with torch.no_grad():
        mark_recomputable(x * 2, lambda x: x * 2, x)
    assert len(SOURCES) == before - 1, "nothing is recorded without gradients"


def saved_bytes_and_grads(model: Decoder) -> tuple[int, list[torch.Tensor]]:
    """Return bytes saved for backward, except weights, and the gradients."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes, saved = {}, []

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved.append(x)  # so that its memory is not reused
        if x.untyped_storage().data_ptr() not in weights:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    torch.manual_seed(0)
    with saved_tensors_hooks(pack, lambda x: x):
        loss = CrossEntropy()(model, make_batch(random_tokens(4, 64)))
    loss.backward()
    return sum(sizes.values()), [p.grad for p in model.parameters() if p.grad is not None]


@pairwise(
    adapter={"lora": LoRAConfig(4), "dropout": LoRAConfig(4, dropout=0.2), "dora": DoRAConfig(4)},
    precision={"fp32": PrecisionConfig("fp32", "fp32", "fp32"), "bf16": PrecisionConfig("bf16", "fp32", "bf16")},
    name=["llama3.2", "gemma2", "qwen3-moe"],
)
def test_norms_and_gates_are_not_saved(
    adapter: LoRAConfig, precision: PrecisionConfig, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, results = make_checkpoint(tmp_path, name), []
    for without_recompute in (False, True):
        if without_recompute:
            for module in (glu, rms_norm):
                monkeypatch.setattr(module, "mark_recomputable", lambda y, *_: y)
        model = load_model(folder, adapter, precision)
        shuffle_adapter(model)
        results.append(saved_bytes_and_grads(model))
    (fewer_bytes, recomputed), (more_bytes, expected) = results
    assert all(map(torch.equal, recomputed, expected))
    # Inputs of attention, and of dense gates with their product. The first is the embedding output, which is saved.
    spec, is_dense = model.spec, name != "qwen3-moe"
    num_values = len(spec.layers) * (1 + is_dense) * spec.dim - spec.dim
    num_values += sum(layer.ffn.intermediate_size for layer in spec.layers) if is_dense else 0
    assert more_bytes - fewer_bytes >= 4 * 64 * num_values * (2 if precision.compute_dtype == "bf16" else 4)
