"""Suggestions of changes that need less memory. Each one is planned, so that savings are exact."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tunekit.adapters.config import LoRAConfig
from tunekit.errors import FieldError, UserError
from tunekit.optim.config import AdamW8bitConfig, AdamWConfig
from tunekit.plan.estimate import Estimate, estimate
from tunekit.plan.workload import Workload
from tunekit.quantization.config import NF4Config

MIN_SAVING = 0.02  # minimum saving, as a fraction of the peak


Alternative = tuple[str, str, Workload]  # overrides, their description, and the workload with them


@dataclass(frozen=True)
class Suggestion:
    """Bytes of the peak that an alternative saves."""

    words: str
    does: str
    saves: int
    plan: Estimate


def suggest_changes(now: Estimate) -> list[Suggestion]:
    """Return the changes that need less memory, sorted by savings."""
    suggestions = []
    for words, does, task in (*of_step(now), *of_model(now), *of_devices(now)):
        try:
            then = estimate(task, now.machine)
        except (UserError, FieldError):  # incompatible with other options
            continue
        if (saves := now.peak.total - then.peak.total) > MIN_SAVING * now.peak.total:
            suggestions.append(Suggestion(words, does, saves, then))
    return sorted(suggestions, key=lambda change: -change.saves)


def of_step(now: Estimate) -> Iterator[Alternative]:
    """Yield changes of activation memory and micro-batch size."""
    task, memory = now.task, now.task.memory
    if memory.activation_checkpointing == "none":
        full = replace(task, memory=replace(memory, activation_checkpointing="full"))
        yield "memory.activation_checkpointing=full", "each layer runs again in the backward pass", full
        if not task.compile:
            selective = replace(task, memory=replace(memory, activation_checkpointing="selective"))
            yield "memory.activation_checkpointing=selective", "norms, rotations and gates run again", selective
    if (rows := task.micro(now.sizes) // 2) and not memory.optimizer_in_bwd:
        yield f"micro_batch_size={rows}", "fewer rows in a forward pass", replace(task, micro_batch_size=rows)
    if now.machine.kind is not None and not memory.activation_offloading:
        offloaded = replace(task, memory=replace(memory, activation_offloading=True))
        yield "memory.activation_offloading=true", "activations wait on the host", offloaded


def of_model(now: Estimate) -> Iterator[Alternative]:
    """Yield changes of optimizer, precision, adapter and quantization."""
    task, full = now.task, not isinstance(now.task.adapter, LoRAConfig)
    if type(task.optimizer) is AdamWConfig:
        small = replace(task, optimizer=AdamW8bitConfig())
        yield "optimizer=adamw8bit", "two bytes of state per weight instead of eight", small
    if full and task.precision.master_dtype == "fp32":
        half = replace(task, precision=replace(task.precision, master_dtype="bf16"))
        yield "precision.master_dtype=bf16", "weights, gradients and state in 16 bits", half
    if full and not task.memory.optimizer_in_bwd and task.num_micro_batches(now.sizes) == 1:
        early = replace(task, memory=replace(task.memory, optimizer_in_bwd=True), max_grad_norm=0.0)
        yield "memory.optimizer_in_bwd=true max_grad_norm=0", "no gradient outlives its layer", early
    if full and not task.random:
        yield "adapter=lora", "small updates are trained, weights stay", replace(task, adapter=LoRAConfig())
    if not full and not isinstance(task.quantization, NF4Config):
        yield "quantization=nf4", "frozen weights in four bits", replace(task, quantization=NF4Config())


def of_devices(now: Estimate) -> Iterator[Alternative]:
    """Yield changes of offloading and parallelism."""
    task, parallel = now.task, now.task.parallel
    if now.machine.devices == 1:
        return
    if now.machine.kind is not None and not parallel.cpu_offload:
        offloaded = replace(task, parallel=replace(parallel, cpu_offload=True))
        yield "parallel.cpu_offload=true", "weights and optimizer wait on the host", offloaded
    if not parallel.reshard_after_forward:
        freed = replace(task, parallel=replace(parallel, reshard_after_forward=True))
        yield "parallel.reshard_after_forward=true", "weights are freed after each layer", freed
    if now.sizes.dp_replicate > 1:
        divided = replace(task, parallel=replace(parallel, dp_replicate=1, dp_shard=None))
        yield "parallel.dp_replicate=1 parallel.dp_shard=null", "weights are divided over all devices", divided
    if parallel.all_gather_dtype == "param" and task.precision.master_dtype == "fp32":
        light = replace(task, parallel=replace(parallel, all_gather_dtype="compute"))
        yield "parallel.all_gather_dtype=compute", "weights travel in 16 bits", light
    if (ranks := 2 * parallel.tp) <= now.machine.per_host:
        split = replace(task, parallel=replace(parallel, tp=ranks))
        yield f"parallel.tp={ranks}", "each layer is shared by that many devices", split
