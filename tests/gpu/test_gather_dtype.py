"""Weights that FSDP gathers in the dtype of the products, as it does on GPUs by default."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.helpers.random_checkpoints import make_batch, make_checkpoint, random_tokens
from tunekit import assets, build
from tunekit.adapters.config import DoRAConfig, LoRAConfig, NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.load_model import load_weights
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.fsdp import allocate, apply_fsdp, fsdp_kwargs
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.models.decoder import Decoder
from tunekit.models.feed_forward import Router
from tunekit.models.linear import Linear
from tunekit.models.precision import PrecisionConfig
from tunekit.quantization.config import NF4Config, NoQuantization

BF16 = PrecisionConfig("bf16", "fp32", "checkpoint")


def sharded(
    folder: Path,
    name: str,
    adapter: NoAdapter | LoRAConfig,
    weights: NoQuantization,
    dist: DistributedContext,
    device: str,
) -> Decoder:
    """A model on the CPU that is sharded as on another kind of device."""
    source = HFCheckpoint.open(make_checkpoint(folder, name))
    model = build.build_meta_model(source, weights, adapter)
    BF16.apply(model, source.dtypes, dist.device)
    dist.device = torch.device(device)
    apply_fsdp(model, dist)
    dist.device = torch.device("cpu")
    allocate(model, dist)
    model.tie()
    load_weights(source, model, quiet=True, dist=dist)
    adapter.init_weights(model, 0)
    return model


def step(model: Decoder) -> tuple[float, dict[str, Tensor], dict[type, set[torch.dtype]]]:
    """Loss, gradients by name, and the dtypes of gathered weights by the class of their module."""
    dtypes: dict[type, set[torch.dtype]] = {}

    def see(module: nn.Module, *_: object) -> None:
        parameters = [p for p in module.parameters(recurse=False) if p.is_floating_point()]
        dtypes.setdefault(type(module), set()).update(p.dtype for p in parameters)

    hooks = [module.register_forward_hook(see) for module in model.modules()]
    loss = CrossEntropy()(model, make_batch(random_tokens()))
    loss.backward()
    for hook in hooks:
        hook.remove()
    grads = {n: p.grad.full_tensor() for n, p in model.named_parameters() if isinstance(p.grad, DTensor)}
    return loss.item(), grads, dtypes


CASES = [
    ("llama3.2", NoAdapter(), NoQuantization()),
    ("qwen3-moe", NoAdapter(), NoQuantization()),
    ("gpt-oss", LoRAConfig(4), NoQuantization()),
]
CASES += [("gemma2", DoRAConfig(4), NF4Config()), ("deepseek-v3", NoAdapter(), NoQuantization())]


@pytest.mark.parametrize(("name", "adapter", "weights"), CASES, ids=[case[0] for case in CASES])
def test_gathering_in_the_compute_dtype_trains_the_same(
    name: str, adapter: NoAdapter | LoRAConfig, weights: NoQuantization, one_rank: DistributedContext, tmp_path: Path
) -> None:
    """Stored weights, reduced gradients and updates remain fp32; routers are gathered as they are stored."""
    (exact, expected, _), (loss, result, dtypes) = (
        step(sharded(tmp_path / device, name, adapter, weights, one_rank, device)) for device in ("cpu", "cuda")
    )
    assert loss == pytest.approx(exact, rel=0.02)
    assert result.keys() == expected.keys() and {grad.dtype for grad in result.values()} == {torch.float32}
    flat = [torch.cat([grads[n].flatten() for n in expected]) for grads in (result, expected)]
    assert torch.cosine_similarity(*flat, dim=0) > 0.99
    if type(weights) is NoQuantization:
        assert dtypes.get(Linear, {torch.bfloat16}) == {torch.bfloat16}
    assert dtypes.get(Router, {torch.float32}) == {torch.float32}


@pytest.mark.parametrize(
    ("weights", "dtype"), [(NoQuantization(), torch.bfloat16), (NF4Config(), None)], ids=["plain", "nf4"]
)
def test_quantized_weights_are_gathered_as_stored(
    weights: NoQuantization, dtype: torch.dtype | None, one_rank: DistributedContext
) -> None:
    """torch 2.11 would cast bytes of codes to bf16, too."""
    source = HFCheckpoint.open(assets.model_dir("tunekit/nano"))
    model = build.build_meta_model(source, weights, LoRAConfig(4))
    BF16.apply(model, source.dtypes, one_rank.device)
    one_rank.device = torch.device("cuda")
    assert one_rank.mesh is not None
    assert fsdp_kwargs(model, one_rank, one_rank.mesh["shard"])["mp_policy"].param_dtype == dtype


def test_default_depends_on_the_device() -> None:
    assert [ParallelConfig().resolve_auto(device).all_gather_dtype for device in ("cpu", "cuda")] == [
        "param",
        "compute",
    ]
    assert [
        ParallelConfig(all_gather_dtype="param").resolve_auto(device).all_gather_dtype for device in ("cpu", "cuda")
    ] == [
        "param",
        "param",
    ]
