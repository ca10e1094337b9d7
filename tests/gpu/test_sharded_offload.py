"""Activation offloading of a model that FSDP shards."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.helpers.random_checkpoints import FP32, make_batch, make_checkpoint, random_tokens
from tunekit import build
from tunekit.adapters.config import NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.fsdp import allocate, apply_fsdp, fsdp_kwargs
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.memory import activation_offloading
from tunekit.memory.activation_offloading import ActivationOffloader
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.models.feed_forward import Experts
from tunekit.models.weight_init import init_weights
from tunekit.quantization.config import NoQuantization


def sharded(folder: Path, name: str, dist: DistributedContext) -> Decoder:
    """A model whose experts are sharded apart from their layers, as with parallel.ep."""
    source = HFCheckpoint.open(make_checkpoint(folder, name))
    model = build.build_meta_model(source, NoQuantization(), NoAdapter())
    FP32.apply(model, source.dtypes, dist.device)
    assert dist.mesh is not None
    for module in [module for module in model.modules() if isinstance(module, Experts)]:
        fully_shard(module, **fsdp_kwargs(model, dist, dist.mesh["shard"]))
    apply_fsdp(model, dist)
    allocate(model, dist)
    init_weights(model, 0)
    return model


def gradients(model: Decoder) -> list[Tensor]:
    model.zero_grad()
    CrossEntropy()(model, make_batch(random_tokens())).backward()
    return [p.grad.full_tensor() for p in model.parameters() if isinstance(p.grad, DTensor)]


@pytest.mark.parametrize("name", ["llama3.2", "qwen3-moe"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_sharded_models_offload_activations_and_no_weight(
    name: str, recompute: str, one_rank: DistributedContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = sharded(tmp_path, name, one_rank)
    plain, sizes = gradients(model), []
    shapes = {tuple(p.shape) for p in model.parameters() if p.ndim > 1}
    shapes |= {shape[:-2] + (shape[-1], shape[-2]) for shape in shapes}

    class Counted(activation_offloading.OffloadedTensor):
        def __init__(self, x: Tensor, *rest: Any) -> None:
            assert tuple(x.shape) not in shapes, "a weight, or its transpose"
            sizes.append(x.nbytes)
            super().__init__(x, *rest)

    monkeypatch.setattr(activation_offloading, "MIN_OFFLOAD_BYTES", 1)
    monkeypatch.setattr(activation_offloading, "OffloadedTensor", Counted)
    model.layer_call = MemoryConfig(activation_checkpointing=recompute).through()
    inner_call = model.layer_call or (lambda layer, *inputs: layer(*inputs))
    model.layer_call = ActivationOffloader(model).wrap_layer_call(inner_call)
    for _ in range(2):  # gathered weights have other addresses in each step
        assert all(map(torch.equal, plain, gradients(model)))
    assert len(sizes) >= 2 * len(model.spec.layers)
