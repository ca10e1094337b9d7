"""The fastest way to do what a config says, of those that fit: how rows are passed, what is kept, how devices share.

What is learnt stays the same, but for rounding: rows of a step and the adapter are not touched. Only if nothing fits so
are moments kept in eight bits, then weights moved as soon as their gradients are there, then weights kept in 16 bits.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from tunekit.adapters.config import LoRAConfig
from tunekit.distributed.parallel_dims import ParallelConfig, ParallelDims
from tunekit.errors import FieldError, UserError
from tunekit.optim.config import AdamW8bitConfig, AdamWConfig
from tunekit.plan.estimate import Estimate, estimate, meta_model, resolve_dims
from tunekit.plan.hardware import ClusterSpec
from tunekit.plan.layer_profile import LayerPass, MemoryInterval, StepProfile
from tunekit.plan.memory import RankMemoryModel, estimate_memory
from tunekit.plan.step_time import estimate_step_time
from tunekit.plan.workload import Workload, profile_workload

CHECKPOINTING_MODES = ("none", "selective", "full")
MAX_MICRO_BATCH_ROWS = 64  # rows in a forward pass
NUM_MEASURED = 6  # of the fastest, that are measured
MEMORY_MARGIN = 0.03  # of the memory, that is left: by so much a plan may be wrong
TIME_TOLERANCE = 0.01  # of a time: what is as fast


@dataclass(frozen=True)
class SearchResult:
    """A way that fits, and what to say for it."""

    words: tuple[str, ...]
    plan: Estimate


def search_config(now: Estimate) -> SearchResult:
    """UserError if nothing fits."""
    if now.machine.memory is None:
        raise UserError("--auto: how much is there? say --gpu-type h100, or --gpu-memory 80G")
    for task in list_fallbacks(now.task):
        candidates = sorted(list_candidates(replace(now, task=task)), key=partial(rank, now.task))
        for _, candidate in candidates[:NUM_MEASURED]:  # what was estimated is measured
            plan = estimate(candidate, now.machine)
            if plan.peak.total <= memory_limit(now.machine):
                return SearchResult(words(now.task, candidate), plan)
    raise UserError(
        f"nothing fits: {now.machine.label} has too little memory for this model however it is trained; "
        "use more devices, adapter=lora quantization=nf4, or a shorter data.max_length"
    )


def memory_limit(machine: ClusterSpec) -> float:
    """Bytes that a way may take."""
    assert machine.memory is not None
    return (1 - MEMORY_MARGIN) * machine.memory


def rank(task: Workload, candidate: tuple[float, Workload]) -> tuple[float, int, float]:
    """The fastest first; of those that are as fast but for a hundredth, the one that changes least."""
    seconds, workload = candidate
    return round(math.log(seconds) / TIME_TOLERANCE), len(words(task, workload)), seconds


def list_fallbacks(task: Workload) -> Iterator[Workload]:
    """The task, then ones that are less and less like it: gradients that do not outlive their layer are not clipped."""
    yield task
    if type(task.optimizer) is AdamWConfig:
        chosen = task.optimizer
        task = replace(task, optimizer=AdamW8bitConfig(chosen.lr, chosen.betas, chosen.eps, chosen.weight_decay))
        yield task
    if not isinstance(task.adapter, LoRAConfig) and not task.memory.optimizer_in_bwd:
        task = replace(task, memory=replace(task.memory, optimizer_in_bwd=True), max_grad_norm=0.0)
        yield task
        if task.precision.master_dtype == "fp32":
            yield replace(task, precision=replace(task.precision, master_dtype="bf16"))


def list_candidates(now: Estimate) -> list[tuple[float, Workload]]:
    """Ways that seem to fit, with the seconds of a step. Layers are measured with one row and with two.

    Devices that share layers wait for each other, and weights that wait on the host take much of it: more of either is
    tried only where nothing fits without.
    """
    first, candidates = now.task.parallel, []
    max_tp = max(now.machine.per_host, first.tp)
    hosts = now.machine.kind is not None and now.machine.devices > 1
    stage = {(first.tp, first.cpu_offload)}
    while stage and not candidates:
        shared = (layout for tensor, hosted in sorted(stage) for layout in list_layouts(now, tensor, hosted))
        candidates = [candidate for layout in shared for candidate in vary_activation_memory(layout, now)]
        larger = {(2 * tensor, hosted) for tensor, hosted in stage if 2 * tensor <= max_tp}
        stage = larger | {(tensor, True) for tensor, hosted in stage if hosts and not hosted}
    return candidates


def list_layouts(now: Estimate, tensor: int, hosted: bool) -> Iterator[ParallelConfig]:
    """How many copies there are of the weights, whether they stay gathered, and in how many bits they travel."""
    parallel, devices = now.task.parallel, now.machine.devices
    if devices == 1:
        yield parallel
        return
    rest, more = divmod(devices, parallel.cp * tensor)
    exact = parallel.all_gather_dtype == "compute" or now.task.precision.master_dtype != "fp32"
    gathers = (parallel.all_gather_dtype,) if exact else ("param", "compute")
    for copies in (n for n in range(1, rest + 1) if not more and rest % n == 0):
        shared = replace(parallel, dp_replicate=copies, dp_shard=None, tp=tensor, cpu_offload=hosted)
        if shared.resolve_dims(devices) == now.sizes:
            shared = replace(parallel, cpu_offload=hosted)
        for gather, reshard in product(gathers, (True, False)):
            yield replace(shared, all_gather_dtype=gather, reshard_after_forward=reshard)


def vary_activation_memory(shared: ParallelConfig, now: Estimate) -> Iterator[tuple[float, Workload]]:
    """By what a pass keeps, and whether it waits on the host."""
    for mode, offload in product(CHECKPOINTING_MODES, (False, True)):
        if (mode == "selective" and now.task.compile) or (offload and now.machine.kind is None):
            continue
        memory = replace(now.task.memory, activation_checkpointing=mode, activation_offloading=offload)
        yield from vary_micro_batch(replace(now.task, memory=memory, parallel=shared), now)


def vary_micro_batch(task: Workload, now: Estimate) -> Iterator[tuple[float, Workload]]:
    """By rows of a forward pass: the most of which the estimate fits, and half of them."""
    try:
        sizes = resolve_dims(with_one_micro_batch(task, now), now.machine)
        profiles = [profiled_model(task, sizes, rows) for rows in (1, 2)]
    except (UserError, FieldError):
        return
    model, max_rows = meta_model(task, sizes), min(task.rows(sizes), MAX_MICRO_BATCH_ROWS)
    counts = [task.rows(sizes)] if task.memory.optimizer_in_bwd else [2**n for n in range(max_rows.bit_length())]
    num_fitting = 0
    for rows in reversed(counts):
        candidate = replace(task, micro_batch_size=rows)
        memory_model = replace(
            profiles[0],
            task=candidate,
            step=extrapolate(profiles, rows, "step"),
            gathered_step=extrapolate(profiles, rows, "gathered_step"),
        )
        if num_fitting < 2 and estimate_memory(memory_model, now.machine).peak.total <= memory_limit(now.machine):
            num_fitting += 1
            seconds = estimate_step_time(memory_model, model, now.machine).seconds
            yield seconds if seconds is not None else 1.0 / rows, candidate


def with_one_micro_batch(task: Workload, now: Estimate) -> Workload:
    """With all rows in one pass, where it must be so."""
    rows = task.rows(task.parallel.resolve_dims(now.machine.devices))
    return replace(task, micro_batch_size=rows) if task.memory.optimizer_in_bwd else task


def profiled_model(task: Workload, sizes: ParallelDims, rows: int) -> RankMemoryModel:
    """As measured with so many rows in each of several passes."""
    passes = 1 if task.memory.optimizer_in_bwd else 2
    probe = replace(task, micro_batch_size=rows, global_batch_size=rows * passes * sizes.dp_size)
    step = profile_workload(probe, sizes)
    light = sizes.grad_avg_size > 1 and task.parallel.all_gather_dtype == "compute"
    return RankMemoryModel(probe, sizes, step, profile_workload(probe, sizes, as_gathered=True) if light else step)


def extrapolate(models: list[RankMemoryModel], rows: int, name: str) -> StepProfile:
    """What is needed grows evenly with the rows."""
    one, two = (vars(model)[name] for model in models)

    def extrapolate_interval(a: MemoryInterval, b: MemoryInterval) -> MemoryInterval:
        peak, retained = (x + (rows - 1) * (y - x) for x, y in zip(a[:2], b[:2], strict=True))
        return MemoryInterval(peak, retained, a.operations)

    def extrapolate_pass(a: LayerPass, b: LayerPass) -> LayerPass:
        values = {}
        for key, x in vars(a).items():
            y = vars(b)[key]
            values[key] = (
                extrapolate_interval(x, y) if isinstance(x, MemoryInterval) else tuple(map(extrapolate_interval, x, y))
            )
        return LayerPass(**values)

    return replace(one, first=extrapolate_pass(one.first, two.first), later=extrapolate_pass(one.later, two.later))


def words(task: Workload, new: Workload) -> tuple[str, ...]:
    """The overrides that lead from a task to another one."""
    overrides = []
    if new.micro_batch_size != task.micro_batch_size:
        overrides.append(f"micro_batch_size={new.micro_batch_size}")
    if type(new.optimizer) is not type(task.optimizer):
        overrides.append("optimizer=adamw8bit")
    if new.max_grad_norm != task.max_grad_norm:
        overrides.append(f"max_grad_norm={new.max_grad_norm:g}")
    for section in ("precision", "memory", "parallel"):
        old, changed = vars(vars(task)[section]), vars(vars(new)[section])
        overrides += [f"{section}.{key}={format_value(value)}" for key, value in changed.items() if value != old[key]]
    return tuple(overrides)


def format_value(value: Any) -> str:
    """As YAML has it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
