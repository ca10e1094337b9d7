"""A plan for ranks that share layers and experts says what tensors then live on each of them."""

from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.parallel.ranks import on
from tunekit import assemble, bundled
from tunekit.adapters import Full
from tunekit.checkpoint.folder import Folder
from tunekit.formats import Plain
from tunekit.layout.shard import shard
from tunekit.layout.split import split
from tunekit.losses.likelihood import CrossEntropy
from tunekit.memory import Memory
from tunekit.models.spec import Attention, DecoderSpec, Layer, MoE, Rope
from tunekit.optim import AdamW
from tunekit.parallel.choice import Parallel
from tunekit.parallel.run import Run
from tunekit.parallel.tensors import local, register
from tunekit.plan import kernels, outcome
from tunekit.plan.machine import Machine
from tunekit.plan.probe import CPU, rows
from tunekit.plan.task import Task, step_of
from tunekit.precision import Precision

# Every expert sees every token: a plan takes experts to have as many as each other.
LAYER = Layer(Attention(4, 2, 32, rope=Rope()), MoE(4, 4, 384))


def task() -> Task:
    source = Folder.open(bundled.PRESETS["tunekit/llama3_2_1b"], "small")
    source = replace(source, spec=DecoderSpec(1024, 128, (LAYER,) * 4))
    chosen = Full(), Plain(), Precision("bf16"), Memory(), AdamW(), CrossEntropy(), Parallel(tensor=2, expert=2)
    return Task(source, 512, 4, 2, *chosen, clip=1.0, random=True)


def lived() -> int:
    """Bytes of the tensors of this rank at most in two steps.

    Every memory that torch takes and gives back is told by its profiler, also what FSDP makes larger and smaller. Not
    told is what a thread of gloo gives back, if it is the last to have it.
    """
    wanted = task()
    with Run(device="cpu", parallel=wanted.parallel) as run:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            stepped(wanted, run)
        profiler: Any = seen.profiler
        events = profiler.kineto_results.events()
        told = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
        return max(accumulate(size for _, size in told))


def stepped(task: Task, run: Run) -> None:
    """Two steps of the recipes, of a model of random weights."""
    net = assemble.outline(task.source, task.weights, task.adapter)
    split(net, run)
    task.precision.apply(net, {}, CPU)
    shard(net, run)
    net.to_empty(device="cpu")
    net.tie()
    register((*net.named_parameters(), *net.named_buffers()), net.splits)
    for parameter in net.parameters():
        local(parameter.data).normal_(std=0.02)
    optimizer = task.optimizer.build(task.adapter.trained(net), [p for each in net.layers for p in each.parameters()])
    update = task.memory.update(optimizer, task.clip, run)
    batch = rows(step_of(task, run.sizes))
    tokens = torch.randint(0, task.source.spec.vocab, batch.tokens.shape)
    batch = replace(batch, tokens=tokens, targets=tokens, positions=torch.arange(task.length).expand_as(tokens))
    for _ in range(2):
        (task.loss(net, batch) / batch.learnt).backward()
        update()


@pytest.mark.multi
def test_ranks_that_share_layers_and_experts_have_the_tensors_that_were_planned() -> None:
    phases = outcome.plan(task(), Machine(4)).room.phases
    planned = max(phases[name].total - phases[name].parts["process"] for name in ("forward", "backward", "step"))
    # All have as much, and of one least is missed that was given back: up to a tenth on others.
    assert planned == pytest.approx(min(on(4, lived)), rel=0.08)


def weighed() -> tuple[int, int]:
    """Bytes of a kernel as planned, and of some more that are made."""
    one, before = kernels.size(), kernels.trimmed()
    kernels.make(range(500, 520))
    return one, (kernels.trimmed() - before) // (20 * kernels.EACH)


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="asks Linux")
@pytest.mark.multi
def test_a_kernel_takes_what_was_weighed() -> None:
    ((one, more),) = on(1, weighed)
    assert one == pytest.approx(more, rel=0.2, abs=2**15)
