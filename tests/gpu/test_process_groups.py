"""Process groups: the timeout of the config in all of them, and a group of one rank as tests on one GPU use it."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests.gpu.device_rules import META
from tests.gpu.process_groups import timeouts
from tests.helpers.optimizer_step import step_optimizer
from tests.helpers.random_checkpoints import FP32, make_batch, make_checkpoint, random_tokens
from tests.helpers.ranks import run_ranks
from tunekit import build
from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.clip_grad import total_grad_norm
from tunekit.distributed.context import HOST_TIMEOUT, TIMEOUT_MARGIN, DistributedContext
from tunekit.distributed.fsdp import allocate, apply_fsdp
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.generation.generate import generate_batch
from tunekit.generation.sampling import SamplingConfig
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.optim.config import AdamWConfig
from tunekit.quantization.config import NoQuantization


@pytest.mark.multi
def test_all_groups_have_the_timeout_of_the_config() -> None:
    for collectives, waits, warned in run_ranks(2, timeouts, ParallelConfig(cp=2, hang_timeout_seconds=77)):
        assert collectives == {timedelta(seconds=77 + TIMEOUT_MARGIN)} and waits == {HOST_TIMEOUT}
        assert not warned


def built(folder: Path, dist: DistributedContext) -> Decoder:
    return build.build_model(
        HFCheckpoint.open(make_checkpoint(folder, "llama3.2")),
        NoQuantization(),
        NoAdapter(),
        FP32,
        MemoryConfig(),
        dist,
    )


def test_one_rank_shards_its_model(one_rank: DistributedContext, tmp_path: Path) -> None:
    """A single process can run all of FSDP: the same loss and gradient as without it."""
    assert one_rank.mesh is not None and one_rank.sum_counts(5) == 5 and one_rank.all_gather_objects("a") == ["a"]
    sharded, plain = built(tmp_path, one_rank), built(tmp_path, DistributedContext.single_process())
    assert isinstance(sharded, FSDPModule) and all(isinstance(p, DTensor) for p in sharded.parameters())
    losses = [CrossEntropy()(model, make_batch(random_tokens())) for model in (sharded, plain)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    assert torch.equal(
        total_grad_norm(sharded.parameters(), one_rank),
        total_grad_norm(plain.parameters(), DistributedContext.single_process()),
    )


def test_offloaded_parameters_are_on_the_cpu_and_buffers_on_the_device(
    one_rank: DistributedContext, tmp_path: Path
) -> None:
    """Placement that FSDP requires before the first forward pass of a model with CPUOffloadPolicy."""
    one_rank.parallel = ParallelConfig(cpu_offload=True)
    source = HFCheckpoint.open(make_checkpoint(tmp_path, "llama3.2"))
    model = build.build_meta_model(source, NoQuantization(), LoRAConfig(4, init="pissa"))
    assert list(model.buffers()), "PiSSA has some"
    FP32.apply(model, source.dtypes, one_rank.device)
    apply_fsdp(model, one_rank)
    one_rank.device = torch.device("meta")  # stands for a GPU
    allocate(model, one_rank)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            assert group is not None
            group._validate_cpu_offload_params()
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}


class Seen(Exception):
    """Ends a pass that has been seen to begin."""


def test_generation_from_offloaded_weights_is_on_the_device_of_the_run(
    one_rank: DistributedContext, tmp_path: Path
) -> None:
    """Tokens, caches and rotations; the embedding, from which the device used to be taken, is on the CPU."""
    one_rank.parallel = ParallelConfig(cpu_offload=True)
    source = HFCheckpoint.open(make_checkpoint(tmp_path, "llama3.2"))
    model = build.build_meta_model(source, NoQuantization(), NoAdapter())
    FP32.apply(model, source.dtypes, one_rank.device)
    apply_fsdp(model, one_rank)
    one_rank.device = META  # stands for a GPU
    allocate(model, one_rank)
    assert model.embed.weight.device.type == "cpu"
    cache = model.make_cache(2, 8)
    model.begin_decoding(cache)
    given = [x for layer in cache.layers for x in vars(layer).values()] + [table.cos for table in cache.tables]

    def see(module: Decoder, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        given.extend(x for x in (*args, kwargs["lengths"]) if x is not None)
        raise Seen

    model.register_forward_pre_hook(see, prepend=True, with_kwargs=True)
    with pytest.raises(Seen):
        generate_batch(model, [[1, 2], [3]], SamplingConfig(max_new_tokens=2), frozenset())
    assert len(given) >= 7 and all(x.is_meta for x in given)


def test_offload_changes_no_number(one_rank: DistributedContext, tmp_path: Path) -> None:
    """Fused AdamW, the norm and clipping on the weights that FSDP offloads."""
    results = []
    for parallel in (ParallelConfig(), ParallelConfig(cpu_offload=True)):
        one_rank.parallel = parallel
        model = built(tmp_path, one_rank)
        train_optimizer = MemoryConfig().wrap_optimizer(AdamWConfig().build([([*model.parameters()], 1.0)]), one_rank)
        for _ in range(2):
            loss = CrossEntropy()(model, make_batch(random_tokens()))
            loss.backward()
            results.append((loss.detach(), step_optimizer(train_optimizer, 1.0)))
    for plain, offloaded in zip(results[:2], results[2:], strict=True):
        assert all(map(torch.equal, plain, offloaded))
