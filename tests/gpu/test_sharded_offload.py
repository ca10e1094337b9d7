"""Activation offloading of a model that FSDP shards."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.checkpoints import FP32, batch, made, tokens
from tunekit import assemble, offload
from tunekit.adapters import Full
from tunekit.checkpoint.folder import Folder
from tunekit.formats import Plain
from tunekit.layout.shard import allocate, choices, shard
from tunekit.losses.likelihood import CrossEntropy
from tunekit.memory import Memory
from tunekit.models.decoder import Decoder
from tunekit.models.experts import Experts
from tunekit.models.init import randomize
from tunekit.offload import Offload
from tunekit.parallel.run import Run


def sharded(folder: Path, name: str, run: Run) -> Decoder:
    """A model whose experts are sharded apart from their layers, as with parallel.expert."""
    source = Folder.open(made(folder, name))
    model = assemble.outline(source, Plain(), Full())
    FP32.apply(model, source.dtypes, run.device)
    assert run.mesh is not None
    for module in [module for module in model.modules() if isinstance(module, Experts)]:
        fully_shard(module, **choices(model, run, run.mesh["shard"]))
    shard(model, run)
    allocate(model, run)
    randomize(model, 0)
    return model


def gradients(model: Decoder) -> list[Tensor]:
    model.zero_grad()
    CrossEntropy()(model, batch(tokens())).backward()
    return [p.grad.full_tensor() for p in model.parameters() if isinstance(p.grad, DTensor)]


@pytest.mark.parametrize("name", ["llama3.2", "qwen3-moe"])
@pytest.mark.parametrize("recompute", [False, True])
def test_sharded_models_offload_activations_and_no_weight(
    name: str, recompute: bool, one_rank: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = sharded(tmp_path, name, one_rank)
    plain, sizes = gradients(model), []
    shapes = {tuple(p.shape) for p in model.parameters() if p.ndim > 1}
    shapes |= {shape[:-2] + (shape[-1], shape[-2]) for shape in shapes}

    class Counted(offload.Away):
        def __init__(self, x: Tensor, *rest: Any) -> None:
            assert tuple(x.shape) not in shapes, "a weight, or its transpose"
            sizes.append(x.nbytes)
            super().__init__(x, *rest)

    monkeypatch.setattr(offload, "LEAST", 1)
    monkeypatch.setattr(offload, "Away", Counted)
    model.through = Memory(recompute=recompute).through()
    model.through = Offload(model).around(model.through or (lambda layer, *inputs: layer(*inputs)))
    for _ in range(2):  # gathered weights have other addresses in each step
        assert all(map(torch.equal, plain, gradients(model)))
    assert len(sizes) >= 2 * len(model.spec.layers)
