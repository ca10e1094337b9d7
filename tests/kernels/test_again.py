"""What is made again in the backward pass: the same bits, and less to keep."""

import gc
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from tests.checkpoints import batch, made, ours, shuffle_adapter, tokens
from tunekit.adapters.config import DoRAConfig, LoRAConfig
from tunekit.kernels import glu, rms_norm
from tunekit.kernels.recompute import ORIGINS, mark_recomputable, recompute_source
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig


def test_an_origin_lives_as_long_as_its_result() -> None:
    x = torch.randn(3)
    y = mark_recomputable(x * 2, lambda x: x * 2, x)
    make, inputs = recompute_source(y)
    assert torch.equal(make(*inputs), y) and inputs[0] is x
    assert recompute_source(x).inputs == (x,) and recompute_source(x).make(x) is x, "of which nothing is known"
    gc.collect()  # what other tests have left would go at any moment
    before = len(ORIGINS)
    del y
    assert len(ORIGINS) == before - 1
    with torch.no_grad():
        mark_recomputable(x * 2, lambda x: x * 2, x)
    assert len(ORIGINS) == before - 1, "nobody keeps anything"


def kept(model: Decoder) -> tuple[int, list[torch.Tensor]]:
    """Bytes that a pass keeps beside the weights, and the gradients."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes, alive = {}, []

    def pack(x: torch.Tensor) -> torch.Tensor:
        alive.append(x)  # so that nothing else gets its place
        if x.untyped_storage().data_ptr() not in weights:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    torch.manual_seed(0)
    with saved_tensors_hooks(pack, lambda x: x):
        loss = CrossEntropy()(model, batch(tokens(4, 64)))
    loss.backward()
    return sum(sizes.values()), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "adapter", [LoRAConfig(4), LoRAConfig(4, dropout=0.2), DoRAConfig(4)], ids=["lora", "dropout", "dora"]
)
@pytest.mark.parametrize(
    "precision", [PrecisionConfig("fp32", "fp32", "fp32"), PrecisionConfig("bf16", "fp32", "bf16")]
)
@pytest.mark.parametrize("name", ["llama3.2", "gemma2", "qwen3-moe"])
def test_norms_and_gates_are_not_kept(
    adapter: LoRAConfig, precision: PrecisionConfig, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, found = made(tmp_path, name), []
    for plain in (False, True):
        if plain:
            for module in (glu, rms_norm):
                monkeypatch.setattr(module, "mark_recomputable", lambda y, *_: y)
        model = ours(folder, adapter, precision)
        shuffle_adapter(model)
        found.append(kept(model))
    (less, again), (more, wanted) = found
    assert all(map(torch.equal, again, wanted))
    # Inputs of attention, and of dense gates with their product; the first comes from the embedding, which is kept.
    spec, dense = model.spec, name != "qwen3-moe"
    wide = len(spec.layers) * (1 + dense) * spec.dim - spec.dim
    wide += sum(layer.ffn.hidden for layer in spec.layers) if dense else 0
    assert more - less >= 4 * 64 * wide * (2 if precision.compute_dtype == "bf16" else 4)
