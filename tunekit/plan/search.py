"""Search for the fastest overrides that fit: micro-batch size, activation memory and parallelism.

The batch size and the adapter do not change, so results are equal up to rounding. Only if nothing fits, the search also
tries 8-bit optimizer states, then optimizer steps in the backward pass, then 16-bit weights.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from torch.utils._pytree import tree_map

from tunekit.adapters.config import LoRAConfig
from tunekit.distributed.parallel_dims import ParallelConfig, ParallelDims
from tunekit.errors import FieldError, UserError
from tunekit.optim.config import AdamW8bitConfig, AdamWConfig
from tunekit.plan.estimate import Estimate, estimate, resolve_dims
from tunekit.plan.hardware import ClusterSpec
from tunekit.plan.layer_profile import LayerPass, MemoryInterval, StepProfile
from tunekit.plan.memory import RankMemoryModel, build_memory_model, estimate_memory
from tunekit.plan.step_time import estimate_step_time
from tunekit.plan.workload import Workload, get_rank_model

CHECKPOINTING_MODES = ("none", "selective", "full")
MAX_MICRO_BATCH_ROWS = 64  # largest micro-batch that is tried
NUM_MEASURED = 6  # fastest candidates, whose profiles are measured and not extrapolated
MEMORY_MARGIN = 0.03  # fraction of the memory that stays free, the error of estimates
TIME_TOLERANCE = 0.01  # relative difference below which two times are equal


@dataclass(frozen=True)
class SearchResult:
    """Overrides that fit, and their estimate."""

    words: tuple[str, ...]
    plan: Estimate


def check_memory_is_known(machine: ClusterSpec) -> None:
    """Raise UserError if no search is possible, as for the CPU."""
    if machine.memory is None:
        raise UserError("--auto: the memory of a device is unknown. Set --gpu-type h100 or --gpu-memory 80G")


def search_config(now: Estimate) -> SearchResult:
    """Find the fastest overrides that fit. Raise UserError if nothing fits."""
    check_memory_is_known(now.machine)
    for task in list_fallbacks(now.task):
        candidates = sorted(list_candidates(replace(now, task=task)), key=partial(rank, now.task))
        for _, candidate in candidates[:NUM_MEASURED]:  # extrapolated profiles are verified
            plan = estimate(candidate, now.machine)
            if plan.peak.total <= memory_limit(now.machine):
                return SearchResult(words(now.task, candidate), plan)
    raise UserError(
        f"nothing fits: {now.machine.label} has too little memory for this model however it is trained; "
        "use more devices, adapter=lora quantization=nf4, or a shorter data.max_length"
    )


def memory_limit(machine: ClusterSpec) -> float:
    """Maximum peak bytes of a candidate."""
    assert machine.memory is not None
    return (1 - MEMORY_MARGIN) * machine.memory


def rank(task: Workload, candidate: tuple[float, Workload]) -> tuple[float, int, float]:
    """Sort key of a candidate: time, then number of overrides for times that differ by less than 1%."""
    seconds, workload = candidate
    return round(math.log(seconds) / TIME_TOLERANCE), len(words(task, workload)), seconds


def list_fallbacks(task: Workload) -> Iterator[Workload]:
    """Yield the workload, then fallbacks that change it more and more. `optimizer_in_bwd` excludes clipping."""
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
    """Candidates that should fit, with the seconds of a step. Profiles are extrapolated from one and two rows.

    Tensor parallelism has exposed communication, and offloading needs much host memory: more of either is tried only
    if nothing fits without it.
    """
    first, candidates = now.task.parallel, []
    max_tp = max(now.machine.per_host, first.tp)
    stage = {(first.tp, first.cpu_offload, offload) for offload in (False, now.task.memory.activation_offloading)}
    while stage and not candidates:
        for tp, cpu_offload, activation_offloading in sorted(stage):
            for layout in list_layouts(now, tp, cpu_offload):
                candidates += vary_activation_memory(layout, activation_offloading, now)
        larger = {(2 * tp, *offloading) for tp, *offloading in stage if 2 * tp <= max_tp}
        if now.machine.kind is not None:
            larger |= {(tp, cpu_offload, True) for tp, cpu_offload, _ in stage}
            larger |= {(tp, True, offload) for tp, _, offload in stage if now.machine.devices > 1}
        stage = larger - stage
    return candidates


def list_layouts(now: Estimate, tp: int, cpu_offload: bool) -> Iterator[ParallelConfig]:
    """Yield layouts: number of replicas, resharding after the forward pass, and dtype of the all-gather."""
    parallel, devices = now.task.parallel, now.machine.devices
    if devices == 1:
        yield parallel
        return
    rest, more = divmod(devices, parallel.cp * tp)
    exact = parallel.all_gather_dtype == "compute" or now.task.precision.master_dtype != "fp32"
    gathers = (parallel.all_gather_dtype,) if exact else ("param", "compute")
    for copies in (n for n in range(1, rest + 1) if not more and rest % n == 0):
        shared = replace(parallel, dp_replicate=copies, dp_shard=None, tp=tp, cpu_offload=cpu_offload)
        if shared.resolve_dims(devices) == now.sizes:
            shared = replace(parallel, cpu_offload=cpu_offload)
        for gather, reshard in product(gathers, (True, False)):
            yield replace(shared, all_gather_dtype=gather, reshard_after_forward=reshard)


def vary_activation_memory(shared: ParallelConfig, offload: bool, now: Estimate) -> Iterator[tuple[float, Workload]]:
    """Yield candidates with each activation checkpointing mode.

    Offloading without `full` checkpointing may need terabytes of host memory: only if the config offloads already.
    """
    needs_full = offload and not now.task.memory.activation_offloading
    for mode in ("full",) if needs_full else CHECKPOINTING_MODES:
        if mode == "selective" and now.task.compile:
            continue
        memory = replace(now.task.memory, activation_checkpointing=mode, activation_offloading=offload)
        yield from vary_micro_batch(replace(now.task, memory=memory, parallel=shared), now)


def vary_micro_batch(task: Workload, now: Estimate) -> Iterator[tuple[float, Workload]]:
    """Yield candidates with the two largest micro-batch sizes (powers of two) that fit."""
    try:
        sizes = resolve_dims(with_one_micro_batch(task, now), now.machine)
        first, second = (profiled_model(task, sizes, rows) for rows in (1, 2))
    except (UserError, FieldError):
        return
    model, max_rows = get_rank_model(task, sizes), min(task.rows(sizes), MAX_MICRO_BATCH_ROWS)
    counts = [task.rows(sizes)] if task.memory.optimizer_in_bwd else [2**n for n in range(max_rows.bit_length())]
    num_fitting = 0
    for rows in reversed(counts):
        candidate = replace(task, micro_batch_size=rows)
        memory_model = replace(
            first,
            task=candidate,
            step=extrapolate(first.step, second.step, rows),
            gathered_step=extrapolate(first.gathered_step, second.gathered_step, rows),
        )
        if num_fitting < 2 and estimate_memory(memory_model, now.machine).peak.total <= memory_limit(now.machine):
            num_fitting += 1
            seconds = estimate_step_time(memory_model, model, now.machine).seconds
            yield seconds if seconds is not None else 1.0 / rows, candidate


def with_one_micro_batch(task: Workload, now: Estimate) -> Workload:
    """Use a single micro-batch if the optimizer runs in the backward pass."""
    rows = task.rows(task.parallel.resolve_dims(now.machine.devices))
    return replace(task, micro_batch_size=rows) if task.memory.optimizer_in_bwd else task


def profiled_model(task: Workload, sizes: ParallelDims, rows: int) -> RankMemoryModel:
    """Memory model with `rows` rows in each micro-batch."""
    passes = 1 if task.memory.optimizer_in_bwd else 2
    return build_memory_model(
        replace(task, micro_batch_size=rows, global_batch_size=rows * passes * sizes.dp_size), sizes
    )


def extrapolate(a: StepProfile, b: StepProfile, rows: int) -> StepProfile:
    """Extrapolate the profiles of one and two rows linearly to `rows` rows."""

    def extrapolate_interval(a: MemoryInterval, b: MemoryInterval) -> MemoryInterval:
        peak, retained = (x + (rows - 1) * (y - x) for x, y in zip(a[:2], b[:2], strict=True))
        return MemoryInterval(peak, retained, a.operations)

    def extrapolate_pass(a: LayerPass, b: LayerPass) -> LayerPass:
        return tree_map(extrapolate_interval, a, b, is_leaf=lambda node: isinstance(node, MemoryInterval))

    return replace(a, first=extrapolate_pass(a.first, b.first), later=extrapolate_pass(a.later, b.later))


def words(task: Workload, new: Workload) -> tuple[str, ...]:
    """Overrides that change a workload into another one."""
    overrides = []
    if new.micro_batch_size != task.micro_batch_size:
        overrides.append(f"micro_batch_size={new.micro_batch_size}")
    if type(new.optimizer) is not type(task.optimizer):
        overrides.append("optimizer=adamw8bit")
    if new.max_grad_norm != task.max_grad_norm:
        overrides.append(f"max_grad_norm={new.max_grad_norm:g}")
    pairs = {
        "precision": (task.precision, new.precision),
        "memory": (task.memory, new.memory),
        "parallel": (task.parallel, new.parallel),
    }
    for section, configs in pairs.items():
        old, changed = map(asdict, configs)
        overrides += [f"{section}.{key}={format_value(value)}" for key, value in changed.items() if value != old[key]]
    return tuple(overrides)


def format_value(value: Any) -> str:
    """Format a value as in YAML."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
