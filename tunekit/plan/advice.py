"""What other choices would change: each is planned too, so that what it saves is no guess."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from tunekit.adapters import LoRA
from tunekit.errors import FieldError, UserError
from tunekit.formats import NF4
from tunekit.optim import AdamW, AdamW8bit
from tunekit.plan.outcome import Plan, plan
from tunekit.plan.task import Task

LEAST = 0.02  # of the highest moment, that a change must save to be worth a line


class Other(NamedTuple):
    """A task with one choice changed, the overrides for it, and what they do."""

    words: str
    does: str
    task: Task


@dataclass(frozen=True)
class Change:
    """What another choice would save of the highest moment."""

    words: str
    does: str
    saves: int
    plan: Plan


def changes(now: Plan) -> list[Change]:
    """Choices that would need less, those that save most first."""
    found = []
    for other in (*of_step(now), *of_model(now), *of_devices(now)):
        try:
            then = plan(other.task, now.machine)
        except (UserError, FieldError):  # it does not go with the rest
            continue
        if (saves := now.peak.total - then.peak.total) > LEAST * now.peak.total:
            found.append(Change(other.words, other.does, saves, then))
    return sorted(found, key=lambda change: -change.saves)


def of_step(now: Plan) -> Iterator[Other]:
    """What a pass keeps, and how large it is."""
    task, memory = now.task, now.task.memory
    if not memory.recompute:
        again = replace(task, memory=replace(memory, recompute=True))
        yield Other("memory.recompute=true", "each layer runs again in the backward pass", again)
        if not memory.compile:
            some = replace(task, memory=replace(memory, recompute="selective"))
            yield Other("memory.recompute=selective", "norms, rotations and gates run again", some)
    if (rows := task.micro(now.sizes)) > 1 and not memory.step_in_backward:
        yield Other(f"micro_batch={rows // 2}", "fewer rows in a forward pass", replace(task, micro_batch=rows // 2))
    if now.machine.kind is not None and not memory.offload:
        away = replace(task, memory=replace(memory, offload=True))
        yield Other("memory.offload=true", "activations wait on the host", away)


def of_model(now: Plan) -> Iterator[Other]:
    """How weights are kept, which are trained, and what is kept for them."""
    task, full = now.task, not isinstance(now.task.adapter, LoRA)
    if type(task.optimizer) is AdamW:
        small = replace(task, optimizer=AdamW8bit())
        yield Other("optimizer=adamw8bit", "two bytes of state a weight in place of eight", small)
    if full and task.precision.trained == "fp32":
        half = replace(task, precision=replace(task.precision, trained="bf16"))
        yield Other("precision.trained=bf16", "weights, gradients and state in 16 bits", half)
    if full and not task.memory.step_in_backward and task.parts(now.sizes) == 1:
        early = replace(task, memory=replace(task.memory, step_in_backward=True), clip=0.0)
        yield Other("memory.step_in_backward=true clip=0", "no gradient outlives its layer", early)
    if full and not task.random:
        yield Other("adapter=lora", "small updates are trained, weights stay", replace(task, adapter=LoRA()))
    if not full and not isinstance(task.weights, NF4):
        yield Other("weights=nf4", "frozen weights in four bits", replace(task, weights=NF4()))


def of_devices(now: Plan) -> Iterator[Other]:
    """Where weights wait, and how they are divided."""
    task, parallel = now.task, now.task.parallel
    if now.machine.devices == 1:
        return
    if now.machine.kind is not None and not parallel.offload:
        away = replace(task, parallel=replace(parallel, offload=True))
        yield Other("parallel.offload=true", "weights and optimizer wait on the host", away)
    if not parallel.reshard:
        freed = replace(task, parallel=replace(parallel, reshard=True))
        yield Other("parallel.reshard=true", "weights are freed behind each layer", freed)
    if now.sizes.replicate > 1:
        divided = replace(task, parallel=replace(parallel, replicate=1, shard=None))
        yield Other("parallel.replicate=1 parallel.shard=null", "weights are divided over all devices", divided)
    if parallel.gather == "weights" and task.precision.trained == "fp32":
        light = replace(task, parallel=replace(parallel, gather="compute"))
        yield Other("parallel.gather=compute", "weights travel in 16 bits", light)
    if (ranks := 2 * parallel.tensor) <= now.machine.per_host:
        split = replace(task, parallel=replace(parallel, tensor=ranks))
        yield Other(f"parallel.tensor={ranks}", "each layer is shared by that many devices", split)
