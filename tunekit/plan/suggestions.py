"""What other choices would change: each is planned too, so that what it saves is no guess."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from tunekit.adapters.config import LoRAConfig
from tunekit.errors import FieldError, UserError
from tunekit.optim.config import AdamW8bitConfig, AdamWConfig
from tunekit.plan.estimate import Estimate, estimate
from tunekit.plan.workload import Workload
from tunekit.quantization.config import NF4Config

MIN_SAVING = 0.02  # of the highest moment, that a change must save to be worth a line


class Alternative(NamedTuple):
    """A task with one choice changed, the overrides for it, and what they do."""

    words: str
    does: str
    task: Workload


@dataclass(frozen=True)
class Suggestion:
    """What another choice would save of the highest moment."""

    words: str
    does: str
    saves: int
    plan: Estimate


def suggest_changes(now: Estimate) -> list[Suggestion]:
    """Choices that would need less, those that save most first."""
    suggestions = []
    for other in (*of_step(now), *of_model(now), *of_devices(now)):
        try:
            then = estimate(other.task, now.machine)
        except (UserError, FieldError):  # it does not go with the rest
            continue
        if (saves := now.peak.total - then.peak.total) > MIN_SAVING * now.peak.total:
            suggestions.append(Suggestion(other.words, other.does, saves, then))
    return sorted(suggestions, key=lambda change: -change.saves)


def of_step(now: Estimate) -> Iterator[Alternative]:
    """What a pass keeps, and how large it is."""
    task, memory = now.task, now.task.memory
    if memory.activation_checkpointing == "none":
        recomputed = replace(task, memory=replace(memory, activation_checkpointing="full"))
        yield Alternative(
            "memory.activation_checkpointing=full", "each layer runs again in the backward pass", recomputed
        )
        if not task.compile:
            selective = replace(task, memory=replace(memory, activation_checkpointing="selective"))
            yield Alternative(
                "memory.activation_checkpointing=selective", "norms, rotations and gates run again", selective
            )
    if (rows := task.micro(now.sizes)) > 1 and not memory.optimizer_in_bwd:
        yield Alternative(
            f"micro_batch_size={rows // 2}", "fewer rows in a forward pass", replace(task, micro_batch_size=rows // 2)
        )
    if now.machine.kind is not None and not memory.activation_offloading:
        offloaded = replace(task, memory=replace(memory, activation_offloading=True))
        yield Alternative("memory.activation_offloading=true", "activations wait on the host", offloaded)


def of_model(now: Estimate) -> Iterator[Alternative]:
    """How weights are kept, which are trained, and what is kept for them."""
    task, full = now.task, not isinstance(now.task.adapter, LoRAConfig)
    if type(task.optimizer) is AdamWConfig:
        small = replace(task, optimizer=AdamW8bitConfig())
        yield Alternative("optimizer=adamw8bit", "two bytes of state a weight in place of eight", small)
    if full and task.precision.master_dtype == "fp32":
        half = replace(task, precision=replace(task.precision, master_dtype="bf16"))
        yield Alternative("precision.master_dtype=bf16", "weights, gradients and state in 16 bits", half)
    if full and not task.memory.optimizer_in_bwd and task.num_micro_batches(now.sizes) == 1:
        early = replace(task, memory=replace(task.memory, optimizer_in_bwd=True), max_grad_norm=0.0)
        yield Alternative("memory.optimizer_in_bwd=true max_grad_norm=0", "no gradient outlives its layer", early)
    if full and not task.random:
        yield Alternative(
            "adapter=lora", "small updates are trained, weights stay", replace(task, adapter=LoRAConfig())
        )
    if not full and not isinstance(task.quantization, NF4Config):
        yield Alternative("quantization=nf4", "frozen weights in four bits", replace(task, quantization=NF4Config()))


def of_devices(now: Estimate) -> Iterator[Alternative]:
    """Where weights wait, and how they are divided."""
    task, parallel = now.task, now.task.parallel
    if now.machine.devices == 1:
        return
    if now.machine.kind is not None and not parallel.cpu_offload:
        offloaded = replace(task, parallel=replace(parallel, cpu_offload=True))
        yield Alternative("parallel.cpu_offload=true", "weights and optimizer wait on the host", offloaded)
    if not parallel.reshard_after_forward:
        freed = replace(task, parallel=replace(parallel, reshard_after_forward=True))
        yield Alternative("parallel.reshard_after_forward=true", "weights are freed behind each layer", freed)
    if now.sizes.dp_replicate > 1:
        divided = replace(task, parallel=replace(parallel, dp_replicate=1, dp_shard=None))
        yield Alternative(
            "parallel.dp_replicate=1 parallel.dp_shard=null", "weights are divided over all devices", divided
        )
    if parallel.all_gather_dtype == "param" and task.precision.master_dtype == "fp32":
        light = replace(task, parallel=replace(parallel, all_gather_dtype="compute"))
        yield Alternative("parallel.all_gather_dtype=compute", "weights travel in 16 bits", light)
    if (ranks := 2 * parallel.tp) <= now.machine.per_host:
        split = replace(task, parallel=replace(parallel, tp=ranks))
        yield Alternative(f"parallel.tp={ranks}", "each layer is shared by that many devices", split)
