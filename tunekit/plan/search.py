"""Search for the fastest config that fits, and for the longest rows that fit.

The batch size and the adapter do not change, so results are equal up to rounding. Only if nothing fits, the search also
tries 8-bit optimizer states, then optimizer steps in the backward pass, then bf16 weights.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

from torch.utils._pytree import tree_map

from tunekit.distributed.parallel_dims import ParallelConfig, ParallelDims
from tunekit.errors import FieldError, UserError
from tunekit.plan.estimate import Estimate, estimate, resolve_dims
from tunekit.plan.hardware import GIB, ClusterSpec
from tunekit.plan.layer_profile import LayerPass, MemoryInterval, StepProfile
from tunekit.plan.memory import RankMemoryModel, build_memory_model, estimate_memory
from tunekit.plan.memory_options import ADAMW_8BIT, BF16_WEIGHTS, OPTIMIZER_IN_BWD, MemoryOption, diff_overrides
from tunekit.plan.step_time import estimate_step_time
from tunekit.plan.workload import Workload, get_rank_model

CHECKPOINTING_MODES = ("none", "selective", "full")
FALLBACKS = (ADAMW_8BIT, OPTIMIZER_IN_BWD, BF16_WEIGHTS)  # change the result of training: each one only if needed
MAX_MICRO_BATCH_ROWS = 64  # largest micro-batch that is tried
NUM_MEASURED = 6  # fastest candidates, whose profiles are measured and not extrapolated
MEMORY_MARGIN = 0.03  # fraction of the memory that stays free, the error of estimates
TIME_TOLERANCE = 0.01  # relative difference below which two times are equal
LENGTH_STEP = 128  # the longest row is a multiple of it
MAX_INTERPOLATIONS = 6  # plans after which the search for the longest row bisects


class SearchResult(NamedTuple):
    """Overrides that fit, the options among them that change the result of training, and the plan."""

    overrides: tuple[str, ...]
    options: tuple[MemoryOption, ...]
    plan: Estimate


def search_config(plan: Estimate) -> SearchResult:
    """Find the fastest overrides that fit. Raise UserError if nothing fits."""
    base = plan.workload
    for workload, options in list_fallbacks(plan):
        candidates = sorted(list_candidates(replace(plan, workload=workload)), key=partial(rank_candidate, base))
        for _, candidate in candidates[:NUM_MEASURED]:  # extrapolated profiles are verified
            new = estimate(candidate, plan.cluster)
            if new.peak.total <= memory_limit(plan.cluster):
                return SearchResult(diff_overrides(base, candidate), options, new)
    raise UserError(
        f"nothing fits: {plan.cluster.label} has too little memory for this model however it is trained; "
        "use more devices, adapter=lora quantization=nf4, or a shorter data.max_length"
    )


def memory_limit(cluster: ClusterSpec) -> float:
    """Maximum peak bytes of a config that fits; inf if the memory is unknown."""
    return math.inf if cluster.memory is None else (1 - MEMORY_MARGIN) * cluster.memory


def rank_candidate(base: Workload, candidate: tuple[float, Workload]) -> tuple[float, int, float]:
    """Sort key of a candidate: time, then number of overrides for times that differ by less than 1%."""
    seconds, workload = candidate
    return round(math.log(seconds) / TIME_TOLERANCE), len(diff_overrides(base, workload)), seconds


def list_fallbacks(plan: Estimate) -> Iterator[tuple[Workload, tuple[MemoryOption, ...]]]:
    """Yield the workload, then with one more of the fallbacks that apply, and those that it has."""
    workload, options = plan.workload, ()
    yield workload, options
    for option in FALLBACKS:
        if option.applies(plan):
            workload, options = option.apply(workload, plan), (*options, option)
            yield workload, options


def list_candidates(plan: Estimate) -> list[tuple[float, Workload]]:
    """Candidates that should fit, with the seconds of a step. Profiles are extrapolated from one and two rows.

    Tensor parallelism has exposed communication, and offloading needs much host memory: more of either is tried only
    if nothing fits without it.
    """
    first, candidates = plan.workload.parallel, []
    max_tp = max(plan.cluster.devices_per_node, first.tp)
    stage = {(first.tp, first.cpu_offload, offload) for offload in (False, plan.workload.memory.activation_offloading)}
    while stage and not candidates:
        for tp, cpu_offload, activation_offloading in sorted(stage):
            for layout in list_layouts(plan, tp, cpu_offload):
                candidates += vary_activation_memory(layout, activation_offloading, plan)
        larger = {(2 * tp, *offloading) for tp, *offloading in stage if 2 * tp <= max_tp}
        if plan.cluster.gpu is not None:
            larger |= {(tp, cpu_offload, True) for tp, cpu_offload, _ in stage}
            larger |= {(tp, True, offload) for tp, _, offload in stage if plan.cluster.devices > 1}
        stage = larger - stage
    return candidates


def list_layouts(plan: Estimate, tp: int, cpu_offload: bool) -> Iterator[ParallelConfig]:
    """Yield layouts: number of replicas, resharding after the forward pass, and dtype of the all-gather."""
    parallel, devices = plan.workload.parallel, plan.cluster.devices
    if devices == 1:
        yield parallel
        return
    dp_size, remainder = divmod(devices, parallel.cp * tp)
    exact = parallel.all_gather_dtype == "compute" or plan.workload.precision.master_dtype != "fp32"
    dtypes = (parallel.all_gather_dtype,) if exact else ("param", "compute")
    for dp_replicate in (n for n in range(1, dp_size + 1) if not remainder and dp_size % n == 0):
        layout = replace(parallel, dp_replicate=dp_replicate, dp_shard=None, tp=tp, cpu_offload=cpu_offload)
        if layout.resolve_dims(devices) == plan.dims:
            layout = replace(parallel, cpu_offload=cpu_offload)
        for dtype, reshard in product(dtypes, (True, False)):
            yield replace(layout, all_gather_dtype=dtype, reshard_after_forward=reshard)


def vary_activation_memory(layout: ParallelConfig, offload: bool, plan: Estimate) -> Iterator[tuple[float, Workload]]:
    """Yield candidates with each activation checkpointing mode.

    Offloading without `full` checkpointing may need terabytes of host memory: only if the config offloads already.
    """
    needs_full = offload and not plan.workload.memory.activation_offloading
    modes = ("full",) if needs_full else CHECKPOINTING_MODES
    if plan.workload.needs_graphs:
        modes = () if offload else ("none",)
    for mode in modes:
        if mode == "selective" and plan.workload.compile:
            continue
        memory = replace(plan.workload.memory, activation_checkpointing=mode, activation_offloading=offload)
        yield from vary_micro_batch(replace(plan.workload, memory=memory, parallel=layout), plan)


def vary_micro_batch(workload: Workload, plan: Estimate) -> Iterator[tuple[float, Workload]]:
    """Yield candidates with the two largest micro-batch sizes (powers of two) that fit."""
    try:
        if workload.memory.optimizer_in_bwd:  # needs a single micro-batch
            rows = workload.rows(workload.parallel.resolve_dims(plan.cluster.devices))
            workload = replace(workload, micro_batch_size=rows)
        dims = resolve_dims(workload, plan.cluster)
        first, second = (profiled_model(workload, dims, rows) for rows in (1, 2))
    except (UserError, FieldError):
        return
    decoder, max_rows = get_rank_model(workload, dims), min(workload.rows(dims), MAX_MICRO_BATCH_ROWS)
    counts = [workload.rows(dims)] if workload.memory.optimizer_in_bwd else [2**n for n in range(max_rows.bit_length())]
    num_fitting = 0
    for rows in reversed(counts):
        candidate = replace(workload, micro_batch_size=rows)
        memory_model = replace(
            first,
            workload=candidate,
            profile=extrapolate(first.profile, second.profile, rows),
            gathered_profile=extrapolate(first.gathered_profile, second.gathered_profile, rows),
        )
        if num_fitting < 2 and estimate_memory(memory_model, plan.cluster).peak.total <= memory_limit(plan.cluster):
            num_fitting += 1
            seconds = estimate_step_time(memory_model, decoder, plan.cluster).seconds
            yield seconds if seconds is not None else 1.0 / rows, candidate


def profiled_model(workload: Workload, dims: ParallelDims, rows: int) -> RankMemoryModel:
    """Memory model with `rows` rows in each micro-batch."""
    num_rows = rows * dims.dp_size * (1 if workload.memory.optimizer_in_bwd else 2)
    return build_memory_model(replace(workload, micro_batch_size=rows, global_batch_size=num_rows), dims)


def extrapolate(a: StepProfile, b: StepProfile, rows: int) -> StepProfile:
    """Extrapolate the profiles of one and two rows linearly to `rows` rows."""

    def extrapolate_interval(a: MemoryInterval, b: MemoryInterval) -> MemoryInterval:
        peak, retained = (x + (rows - 1) * (y - x) for x, y in zip(a[:2], b[:2], strict=True))
        return MemoryInterval(peak, retained, a.operations)

    def extrapolate_pass(a: LayerPass, b: LayerPass) -> LayerPass:
        return tree_map(extrapolate_interval, a, b, is_leaf=lambda node: isinstance(node, MemoryInterval))

    return replace(a, first=extrapolate_pass(a.first, b.first), later=extrapolate_pass(a.later, b.later))


class MaxLength(NamedTuple):
    """The longest rows that fit, and whether the context of the model limits them rather than memory."""

    length: int
    is_context: bool
    plan: Estimate


def search_max_length(plan: Estimate) -> MaxLength:
    """Find the longest row that fits, a multiple of `LENGTH_STEP`. Raise UserError if not even that fits.

    Memory is nearly linear in the length, so most of the few plans are interpolations.
    """
    limit, context = memory_limit(plan.cluster), plan.workload.source.spec.context
    unit = min(LENGTH_STEP, context)
    longest = with_length(plan, unit)
    if (missing := longest.peak.total - limit) > 0:
        problem = f"with data.max_length={unit}, {plan.cluster.label} is short by {missing / GIB:.2f} GiB"
        raise UserError(f"nothing fits: {problem}. `--auto` searches for options that use less memory")
    low, high, points = 1, context // unit + 1, {1: longest.peak.total}
    steps = min(max(2, plan.workload.max_length // unit), high - 1)
    while high - low > 1:
        candidate = with_length(plan, steps * unit)
        points[steps] = candidate.peak.total
        if candidate.peak.total <= limit:
            low, longest = steps, candidate
        else:
            high = steps
        steps = next_length(points, low, high, limit)
    return MaxLength(low * unit, low == context // unit, longest)


def next_length(points: dict[int, int], low: int, high: int, limit: float) -> int:
    """Length between `low`, which fits, and `high`, which does not, from the peaks of the planned lengths."""
    if len(points) > MAX_INTERPOLATIONS:
        return (low + high) // 2
    a, b = (low, high) if high in points else sorted(points)[-2:]
    slope = (points[b] - points[a]) / (b - a)
    guess = a + (limit - points[a]) / slope if slope > 0 else high
    return int(min(max(guess, low + 1), high - 1))


def with_length(plan: Estimate, length: int) -> Estimate:
    """The plan with `data.max_length=length`."""
    workload = plan.workload
    rollouts = workload.rollouts._replace(length=length) if workload.rollouts.rows else workload.rollouts
    max_length = workload.docs_per_packed_row * length
    return estimate(replace(workload, max_length=max_length, rollouts=rollouts), plan.cluster)
