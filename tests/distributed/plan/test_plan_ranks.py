"""Plans with tensor and expert parallelism match the memory of each rank."""

from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.helpers.optimizer_step import step_optimizer
from tests.helpers.plan_workloads import build_workload, make_checkpoint
from tests.helpers.ranks import run_ranks
from tunekit import build
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.fsdp import apply_fsdp
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.distributed.parallelize import parallelize
from tunekit.distributed.sharding import register_shards, to_local
from tunekit.models.spec import Attention, Layer, MoE, Rope
from tunekit.plan import estimate, onednn_cache
from tunekit.plan.hardware import ClusterSpec
from tunekit.plan.layer_profile import CPU, rows
from tunekit.plan.workload import Workload, probe_step

# Each expert gets all tokens, because plans assume balanced experts.
LAYER = Layer(Attention(4, 2, 32, rope=Rope()), MoE(4, 4, 384))


def make_workload() -> Workload:
    return build_workload(make_checkpoint(*(LAYER,) * 4), max_length=512, parallel=ParallelConfig(tp=2, ep=2))


def measured_peak_bytes() -> int:
    """Peak bytes of tensors on this rank in two steps.

    The profiler of torch records all allocations, including those of FSDP. It misses memory that a thread of gloo
    frees.
    """
    workload = make_workload()
    with DistributedContext(device="cpu", parallel=workload.parallel) as dist:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            run_two_steps(workload, dist)
        profiler: Any = profiled.profiler
        events = profiler.kineto_results.events()
        dims = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
        return max(accumulate(size for _, size in dims))


def run_two_steps(workload: Workload, dist: DistributedContext) -> None:
    """Two training steps of a model with random weights."""
    decoder = build.build_meta_model(workload.source, workload.quantization, workload.adapter)
    parallelize(decoder, dist)
    workload.precision.apply(decoder, {}, CPU)
    apply_fsdp(decoder, dist)
    decoder.to_empty(device="cpu")
    decoder.tie()
    register_shards((*decoder.named_parameters(), *decoder.named_buffers()), decoder.shards)
    for parameter in decoder.parameters():
        to_local(parameter.data).normal_(std=0.02)
    optimizer = workload.optimizer.build(
        workload.adapter.param_groups(decoder), [p for layer in decoder.layers for p in layer.parameters()]
    )
    train_optimizer = workload.memory.wrap_optimizer(optimizer, dist)
    batch = rows(probe_step(workload, dist.dims))
    tokens = torch.randint(0, workload.source.spec.vocab, batch.tokens.shape)
    batch = replace(batch, tokens=tokens, targets=tokens, positions=torch.arange(workload.max_length).expand_as(tokens))
    for _ in range(2):
        (workload.loss(decoder, batch) / batch.num_target_tokens).backward()
        step_optimizer(train_optimizer, workload.max_grad_norm)


@pytest.mark.multi
def test_estimated_memory_of_tp_and_ep_matches_real_steps() -> None:
    phases = estimate.estimate(make_workload(), ClusterSpec(4)).memory.phases
    estimated = max(
        phases[name].total - phases[name].components["runtime"] for name in ("forward", "backward", "optimizer_step")
    )
    # Allocations are equal on all ranks. Freed memory that is missed adds up to a tenth; use the rank that misses
    # least.
    assert estimated == pytest.approx(min(run_ranks(4, measured_peak_bytes)), rel=0.08)


def kernel_bytes() -> tuple[int, int]:
    """Estimated bytes of a kernel, and the measured mean of further kernels."""
    estimated, trimmed_before = onednn_cache.onednn_kernel_bytes(), onednn_cache.trimmed_process_bytes()
    onednn_cache.create_kernels(range(500, 520))
    return estimated, (onednn_cache.trimmed_process_bytes() - trimmed_before) // (20 * onednn_cache.KERNELS_PER_SIZE)


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="asks Linux")
@pytest.mark.multi
def test_onednn_kernel_size_is_accurate() -> None:
    ((estimated, measured),) = run_ranks(1, kernel_bytes)
    assert estimated == pytest.approx(measured, rel=0.2, abs=2**15)
