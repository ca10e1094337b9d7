"""Reports of a plan as text and as JSON."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tunekit.plan.estimate import Estimate
from tunekit.plan.hardware import GIB
from tunekit.plan.memory_options import PlannedOption
from tunekit.plan.search import MaxLength, SearchResult
from tunekit.plan.step_time import StepTime

MAX_WIDTH = 120  # columns
USUAL_HOST_MEMORY = 2000 * GIB  # that of servers with eight GPUs
COMPONENTS = {
    "weights": "weights",
    "auxiliary_models": "auxiliary models",
    "gradients": "gradients",
    "optimizer_states": "optimizer states",
    "kv_cache": "KV cache",
    "activations": "activations",
    "logits": "logits and their gradients",
    "all_gathered": "all-gathered weights",
    "temporary_buffers": "temporary buffers",
    "runtime": "CPU runtime and libraries",
}
NO_SIZE = "-"  # less than 5 MiB
GPU_RUNTIME = "CUDA context, NCCL, fragmentation"


def format_report(plan: Estimate, options: Sequence[PlannedOption]) -> str:
    """Format the full report."""
    parts = [format_header(plan), format_memory(plan), format_peak(plan, options), format_communication(plan)]
    return "\n\n".join(part for part in (*parts, format_time(plan), "\n".join(plan.workload.omissions)) if part)


def format_header(plan: Estimate) -> str:
    """Format model, cluster, batch and parallelism."""
    workload, dims = plan.workload, plan.dims
    weights = [weight for unit in plan.memory_model.units for weight in unit]
    num_trained = sum(weight.trained * math.prod(weight.shape) for weight in weights)
    rows = count(workload.micro_batch_rows(dims), "pair" if workload.docs_per_row == 2 else "row")
    rows += f" x {workload.docs_per_row}" if workload.docs_per_row > 1 else ""
    rows = f"{rows} x {workload.max_length:,} tokens per micro-batch"
    rows = f"{rows}, {count(workload.num_micro_batches(dims), 'micro-batch', 'es')} per step"
    rows = f"each rank: {rows}" if plan.cluster.devices > 1 else rows
    rows += f"; {num_trained:,} trainable parameters" if max(dims.tp, dims.ep) == 1 else ""
    degrees = ", ".join(f"{name}={degree}" for name, degree in asdict(dims).items() if degree > 1)
    lines = [f"{workload.source.name} on {plan.cluster.label}", rows, *([f"parallel: {degrees}"] if degrees else [])]
    return "\n".join(lines)


def format_memory(plan: Estimate) -> str:
    """Format the table of peak memory by component and phase."""
    phases = plan.memory.phases
    rows = [["GiB per rank" if plan.cluster.devices > 1 else "GiB", *(name.replace("_", " ") for name in phases)]]
    for name in COMPONENTS:
        sizes = [format_gib(peak.components.get(name, 0)) for peak in phases.values()]
        rows += [[component_label(plan, name), *sizes]] if set(sizes) != {NO_SIZE} else []
    lines = format_table([*rows, ["total", *(format_gib(peak.total) for peak in phases.values())]])
    return "\n".join([*lines, *([f"host memory: {format_host_memory(plan)}"] if plan.memory.host else [])])


def component_label(plan: Estimate, name: str) -> str:
    return GPU_RUNTIME if name == "runtime" and plan.cluster.gpu is not None else COMPONENTS[name]


def format_host_memory(plan: Estimate) -> str:
    """Format the memory of each node that offloading needs, with a warning if it is more than nodes usually have."""
    size = plan.memory.host * plan.cluster.devices_per_node
    warning = " (warning: more than most nodes have)" if size > USUAL_HOST_MEMORY else ""
    return f"{format_gib(size)} GiB per node{warning}"


def format_peak(plan: Estimate, options: Sequence[PlannedOption]) -> str:
    """Format the peak, its largest component, whether it fits, and the options that use less memory."""
    lines = [f"peak: {describe_peak(plan)}"]
    if plan.cluster.memory is not None:
        free = plan.cluster.memory - plan.peak.total
        lines.append(f"fits: {format_gib(free)} GiB free" if plan.fits else f"does not fit: {format_shortage(plan)}")
    if options:
        lines += ["\noptions that use less memory:", *format_options(plan, options)]
    return "\n".join(lines)


def describe_peak(plan: Estimate) -> str:
    """`16.5 GiB in the backward pass (layer 2 of 32); largest component: weights, 3.74 GiB`."""
    peak, phase = plan.peak, plan.memory.phase.replace("_", " ")
    phase += " pass" if phase in ("forward", "backward") else ""
    name = largest_component(plan)
    largest = f"{component_label(plan, name)}, {format_gib(peak.components[name])} GiB"
    return f"{format_gib(peak.total)} GiB in the {phase} ({peak.where}); largest component: {largest}"


def format_shortage(plan: Estimate) -> str:
    """`short by 3.2 GiB`."""
    assert plan.cluster.memory is not None
    return f"short by {format_gib(plan.peak.total - plan.cluster.memory)} GiB"


def largest_component(plan: Estimate) -> str:
    """The largest component of the peak."""
    components = plan.peak.components
    return max(components, key=lambda name: components[name])


def format_options(plan: Estimate, options: Sequence[PlannedOption]) -> list[str]:
    """Format one line for each option: savings, overrides, effect, and change of the step time."""
    lines = []
    for option in options:
        old, new = plan.step_time.seconds, option.plan.step_time.seconds
        change = new / old - 1 if old and new is not None else 0.0
        time = f" ({change:+.0%} time)" if abs(change) >= 0.02 else ""
        saved = f"-{format_gib(option.saved_bytes)}"
        lines.append(f"  {saved:>5} GiB  {' '.join(option.overrides)}: {option.effect}{time}")
    return lines


def format_communication(plan: Estimate) -> str:
    """Format the table of communication volumes; empty on one rank."""
    rows = [["communication per rank and step", "GiB", "ranks", "GB/s", "seconds", ""]]
    for volume in plan.step_time.comm_volumes:
        speed = plan.cluster.bandwidth(volume.ranks, volume.stride)
        times = ["", ""] if speed == math.inf else [f"{speed / 1e9:.0f}", f"{volume.bytes / speed:.2f}"]
        name, size = f"{volume.collective}: {volume.tensors}", format_gib(volume.bytes)
        rows.append([name, size, str(volume.ranks), *times, "overlapped" if volume.overlapped else "exposed"])
    return "\n".join(format_table(rows, left=(0, 5))) if len(rows) > 1 else ""


def format_time(plan: Estimate) -> str:
    """Format step time, number of steps and cost."""
    step_time, gpu = plan.step_time, plan.cluster.gpu
    lines = [f"{plan.tokens:,} tokens per step, {step_time.flops / 1e12:,.1f} TFLOP per rank"]
    if step_time.seconds is not None and gpu is not None:
        line = f"step time: {format_duration(step_time.seconds)}{format_breakdown(step_time)}, "
        line += f"{plan.tokens / step_time.seconds:,.0f} tokens/s"
        lines += textwrap.wrap(line, MAX_WIDTH, subsequent_indent="  ")
        dtype = plan.workload.precision.compute_dtype
        lines.append(f"assumes {plan.cluster.mfu:.0%} MFU of {gpu.rate(dtype):,.0f} TFLOP/s ({gpu.label}, {dtype})")
        if step_time.seconds == step_time.launches:
            lines.append(
                f"CPU-bound: launching {step_time.num_launches:,} kernels takes longer than running them; "
                "larger micro-batches cost little time"
            )
    lines.append(format_total(plan))
    if plan.cost is not None:
        cost = f"{plan.cost:,.2f}" if plan.cost >= 1 else f"{plan.cost:.2g}"
        unit = "" if plan.step_count is not None else " per step"
        lines.append(f"cost: {cost}{unit}, at {plan.cluster.price:g} per GPU-hour")
    return "\n".join(lines)


def format_total(plan: Estimate) -> str:
    """Format number of steps, tokens and total time."""
    steps = plan.step_count
    if steps is None:
        return "number of steps: unknown; set max_steps, or use local data files"
    about = "" if steps.exact else "about "
    text = f"{about}{count(steps.steps, 'step')}"
    if steps.rows is not None:
        text += f" ({count(steps.epochs, 'epoch')} of {steps.rows:,} rows{', packed' if steps.packed else ''})"
    if steps.tokens is None:
        text += f", at most {steps.steps * plan.tokens:,} tokens"
    else:
        text += f", {about}{steps.tokens:,} tokens"
    return text if plan.hours is None else f"{text}: {format_duration(3600 * plan.hours)}"


def format_breakdown(step_time: StepTime) -> str:
    """Format the components of the step time that take at least 1% of it."""
    assert step_time.seconds is not None and step_time.compute is not None
    parts = {
        "matmul": step_time.compute,
        "overlapped communication": step_time.overlapped_comm,
        "exposed communication": step_time.exposed_comm,
        "overlapped copies to and from host memory": step_time.host_copies,
        "optimizer step": step_time.optimizer,
        "kernel launches": step_time.launches,
    }
    threshold = 0.01 * step_time.seconds
    items = [f"{name} {format_duration(seconds)}" for name, seconds in parts.items() if seconds >= threshold]
    return f" ({', '.join(items)})" if items else ""


def format_search_result(result: SearchResult) -> str:
    """Format the config that `--auto` has found."""
    if not result.overrides:
        limits = "" if result.plan.workload.memory.activation_offloading else " without activation offloading"
        return f"auto: the config is already the fastest that fits{limits}"
    seconds = result.plan.step_time.seconds
    summary = [f"peak {format_gib(result.plan.peak.total)} GiB"]
    summary += [f"host memory {format_host_memory(result.plan)}"] if result.plan.memory.host else []
    summary += [f"step time {format_duration(seconds)}"] if seconds is not None else []
    costs = [f"warning: {option.cost}" for option in result.options]
    return "\n      ".join([f"auto: {' '.join(result.overrides)}", ", ".join(summary), *costs])


def format_max_length(result: MaxLength) -> str:
    """Format the longest rows that fit, and their limit."""
    plan = result.plan
    assert plan.cluster.memory is not None
    limit = f"limited by the context of the model, {plan.workload.source.spec.context:,} tokens"
    if not result.is_context:
        limit = f"limited by the memory of {format_gib(plan.cluster.memory)} GiB, of which 3% stay free"
    return f"longest rows that fit: data.max_length={result.length}\n  {limit}\n  peak: {describe_peak(plan)}"


def count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{plural if number != 1 else ''}"


def format_duration(seconds: float) -> str:
    """Format seconds in a readable unit."""
    for least, size, unit in ((2 * 86400, 86400, "days"), (5400, 3600, "hours"), (90, 60, "minutes")):
        if seconds >= least:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def format_gib(bytes: int) -> str:
    """Format bytes as GiB with three digits."""
    size = bytes / GIB
    if abs(size) < 0.005:
        return NO_SIZE
    return f"{size:,.0f}" if abs(size) >= 100 else f"{size:.1f}" if abs(size) >= 10 else f"{size:.2f}"


def format_table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Format rows as aligned columns. Columns in `left` are left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = ([f"{cell:{'<' if i in left else '>'}{widths[i]}}" for i, cell in enumerate(row)] for row in rows)
    return ["  ".join(line).rstrip() for line in cells]


def report_json(
    plan: Estimate, options: Sequence[PlannedOption], result: SearchResult | MaxLength | None = None
) -> dict[str, Any]:
    """The report as JSON data, in bytes and seconds, with the result of `--auto` or `--max-length`."""
    step_time = plan.step_time
    phases = {name: {"total": p.total, "where": p.where, **p.components} for name, p in plan.memory.phases.items()}
    return {
        "model": plan.workload.source.name,
        "hardware": plan.cluster.label,
        "parallel_dims": asdict(plan.dims),
        "phases": phases,
        "peak": plan.peak.total,
        "largest_component": largest_component(plan),
        "host_memory": plan.memory.host,
        "device_memory": plan.cluster.memory,
        "fits": plan.fits,
        "memory_options": list(map(option_json, options)),
        "communication": [asdict(volume) for volume in step_time.comm_volumes],
        "tokens_per_step": plan.tokens,
        "num_steps": None if plan.step_count is None else plan.step_count.steps,
        "flops": step_time.flops,
        "step_seconds": step_time.seconds,
        "kernel_launches": step_time.num_launches,
        "hours": plan.hours,
        "cost": plan.cost,
        **({} if result is None else result_json(result)),
    }


def option_json(option: PlannedOption) -> dict[str, Any]:
    saved, seconds = option.saved_bytes, option.plan.step_time.seconds
    effect, cost = option.effect, option.option.cost
    return {
        "overrides": [*option.overrides],
        "effect": effect,
        "cost": cost,
        "saved_bytes": saved,
        "step_seconds": seconds,
    }


def result_json(result: SearchResult | MaxLength) -> dict[str, dict[str, Any]]:
    """The result of a search as JSON data."""
    plan = result.plan
    data = {"peak": plan.peak.total, "step_seconds": plan.step_time.seconds}
    if isinstance(result, SearchResult):
        return {"auto": {"overrides": list(result.overrides), **data}}
    limit = "context" if result.is_context else "memory"
    at = {"phase": plan.memory.phase, "largest_component": largest_component(plan)}
    return {"max_length": {"tokens": result.length, "limited_by": limit, **data, **at}}
