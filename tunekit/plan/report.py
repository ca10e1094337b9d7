"""Reports of a plan as text and as JSON."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tunekit.plan.estimate import Estimate
from tunekit.plan.hardware import GIB
from tunekit.plan.memory import MemoryEstimate
from tunekit.plan.search import SearchResult
from tunekit.plan.step_time import StepTime
from tunekit.plan.suggestions import Suggestion

MAX_WIDTH = 120  # columns
USUAL_HOST_MEMORY = 2000 * GIB  # that of servers with eight GPUs

PHASE_LABELS = {
    "load": "load the model",
    "sample": "sampling of answers",
    "forward": "forward pass",
    "backward": "backward pass",
    "step": "optimizer step",
    "save": "save",
}

COMPONENT_LABELS = {
    "weights": "weights are",
    "auxiliary": "the auxiliary model is",
    "gradients": "gradients are",
    "optimizer": "what the optimizer keeps is",
    "kv_cache": "the cache of keys and values is",
    "activations": "activations are",
    "logits": "logits and their gradients are",
    "gathered": "weights gathered from other ranks are",
    "other": "what comes and goes is",
    "process": "what is no tensor is",
}


def format_report(plan: Estimate, changes: Sequence[Suggestion]) -> str:
    """Format the full report."""
    parts = [format_header(plan), format_memory(plan), format_verdict(plan, changes)]
    parts += [format_traffic(plan)] if plan.step_time.comm_volumes else []
    parts += [format_time(plan), "\n".join(plan.task.omissions)]
    return "\n\n".join(part for part in parts if part)


def format_header(plan: Estimate) -> str:
    """Format model, machine, batch and parallelism."""
    task, sizes = plan.task, plan.sizes
    memory_model = plan.memory_model
    params = [weight for unit in memory_model.units for weight in unit]
    trained = sum(weight.trained * math.prod(weight.shape) for weight in params)
    passes = "1 pass" if task.num_micro_batches(sizes) == 1 else f"{task.num_micro_batches(sizes)} passes"
    micro_batch, noun = str(task.micro(sizes)), "pairs" if task.docs_per_row == 2 else "rows"
    micro_batch += f" {noun} x {task.docs_per_row}" if task.docs_per_row > 1 else ""
    rows = f"{micro_batch} x {task.max_length:,} tokens in a pass, {passes} a step"
    shared = ", ".join(f"{name} {count}" for name, count in asdict(sizes).items() if count > 1)
    where = f"{task.source.name} on {plan.machine.label}"
    lines = [where, f"each rank: {rows}" if plan.machine.devices > 1 else rows]
    lines[1] += f"; {trained:,} weights are trained" if max(sizes.tp, sizes.ep) == 1 else ""
    return "\n".join([*lines, *([f"shared as: {shared}"] if shared else [])])


def format_memory(plan: Estimate) -> str:
    """Format the table of peak memory by phase and component."""
    estimate = plan.memory
    columns = [part for part in COMPONENT_LABELS if any(moment.parts.get(part) for moment in estimate.phases.values())]
    rows = [["GiB of each rank" if plan.machine.devices > 1 else "GiB", "in all", *columns]]
    for name, moment in estimate.phases.items():
        rows.append(
            [PHASE_LABELS[name], format_gib(moment.total), *(format_gib(moment.parts.get(part, 0)) for part in columns)]
        )
    lines = format_table(rows)
    if estimate.host:
        lines.append(f"and {format_host_memory(plan)}")
    return "\n".join(lines)


def format_host_memory(plan: Estimate) -> str:
    """Format the memory of each host that offloading needs, with a warning if it is more than hosts usually have."""
    size = plan.memory.host * plan.machine.per_host
    warning = " (warning: more than most hosts have)" if size > USUAL_HOST_MEMORY else ""
    return f"{format_gib(size)} GiB of the memory of each host{warning}"


def format_verdict(plan: Estimate, changes: Sequence[Suggestion]) -> str:
    """Format the peak, its largest component, whether it fits, and suggestions."""
    estimate, peak = plan.memory, plan.peak
    part, phase = largest_component(estimate), PHASE_LABELS[estimate.phase]
    at = phase if peak.where in phase else f"{phase} ({peak.where})"
    share = peak.parts[part] / peak.total
    lines = [f"at most {format_gib(peak.total)} GiB, in the {at}; {COMPONENT_LABELS[part]} {share:.0%} of it"]
    if plan.fits is not None:
        assert plan.machine.memory is not None
        free = format_gib(abs(plan.machine.memory - peak.total))
        lines.append(f"fits: {free} GiB are left" if plan.fits else f"does not fit: {free} GiB are lacking")
    if changes:
        lines.append("\nto need less")
        lines += format_suggestions(plan, changes)
    return "\n".join(lines)


def format_suggestions(plan: Estimate, changes: Sequence[Suggestion]) -> list[str]:
    """Format one line for each suggestion."""
    return format_table(
        [[f"  {c.words}", f"-{format_gib(c.saves)} GiB", format_tradeoff(plan, c)] for c in changes], left=(0, 2)
    )


def format_tradeoff(plan: Estimate, change: Suggestion) -> str:
    """Format the description of a change and its effect on the step time."""
    now, then = plan.step_time.seconds, change.plan.step_time.seconds
    slower = "" if not now or then is None or abs(then / now - 1) < 0.02 else f" ({then / now - 1:+.0%} time)"
    return change.does + slower


def largest_component(estimate: MemoryEstimate) -> str:
    """The largest component of the peak."""
    parts = estimate.peak.parts
    return max(parts, key=lambda name: parts[name])


def format_traffic(plan: Estimate) -> str:
    """Format the table of communication volumes."""
    rows = [["sent by each rank in a step", "GiB", "ranks", "GB/s", "seconds"]]
    for flow in plan.step_time.comm_volumes:
        speed = plan.machine.bandwidth(flow.ranks, flow.stride)
        known = [] if speed == float("inf") else [f"{speed / 1e9:.0f}", f"{flow.bytes / speed:.2f}"]
        rows.append([f"{flow.kind}: {flow.tensors}", format_gib(flow.bytes), str(flow.ranks), *(known or ["", ""])])
    return "\n".join(format_table(rows))


def format_time(plan: Estimate) -> str:
    """Format step time, number of steps and cost."""
    step_time = plan.step_time
    lines = [f"{plan.tokens:,} tokens a step, {step_time.flops / 1e12:,.1f} TFLOP on each rank"]
    if step_time.seconds is not None and step_time.compute is not None:
        kind = plan.machine.kind
        assert kind is not None
        line = f"about {format_duration(step_time.seconds)} a step{format_breakdown(step_time)}, "
        line += f"{plan.tokens / step_time.seconds:,.0f} tokens/s"
        lines += textwrap.wrap(line, MAX_WIDTH, subsequent_indent="  ")
        guess = " (no kind is named; --gpu-type says which)" if plan.machine.is_assumed else ""
        rate = kind.rate(plan.task.precision.compute_dtype)
        lines.append(f"if {plan.machine.mfu:.0%} of the {rate:,.0f} TFLOP/s of one {kind.label} are reached{guess}")
        if step_time.seconds == step_time.launch:
            lines.append(
                f"limited by the host, which launches {step_time.launches:,} kernels: longer passes cost little"
            )
    lines.append(format_total(plan))
    if plan.cost is not None:
        unit = "" if plan.step_count is not None else " a step"
        sum = f"{plan.cost:,.2f}" if plan.cost >= 1 else f"{plan.cost:.2g}"
        lines.append(f"costs {sum}{unit}, at {plan.machine.price:g} a device and hour")
    return "\n".join(lines)


def format_total(plan: Estimate) -> str:
    """Format number of steps, tokens and total time."""
    step_count = plan.step_count
    if step_count is None:
        return "the number of steps is unknown: set max_steps, or use local data files"
    about = "" if step_count.exact else "about "
    text = f"{about}{step_count.steps:,} step{'s' * (step_count.steps != 1)}"
    if step_count.rows is not None:
        epochs = f"{step_count.epochs:,} epoch{'s' * (step_count.epochs > 1)} of "
        text += f" ({epochs}{step_count.rows:,} rows{', packed' if step_count.packed else ''})"
    if step_count.tokens is None:
        text += f", at most {step_count.steps * plan.tokens:,} tokens"
    else:
        text += f", {about}{step_count.tokens:,} tokens"
    return text if plan.hours is None else f"{text}: {format_duration(3600 * plan.hours)}"


def format_breakdown(step_time: StepTime) -> str:
    """Format the components of the step time that take at least 1% of it."""
    assert step_time.seconds is not None and step_time.compute is not None
    parts = {
        "products": step_time.compute,
        "sent in parallel": step_time.hidden,
        "to the host and back in parallel": step_time.host_transfer,
        "waited for": step_time.exposed_comm,
        "optimizer": step_time.optimizer,
        "kernel launches": step_time.launch,
    }
    items = [
        f"{name} {format_duration(seconds)}" for name, seconds in parts.items() if seconds >= 0.01 * step_time.seconds
    ]
    return f" ({', '.join(items)})" if items else ""


def format_duration(seconds: float) -> str:
    """Format seconds in a readable unit."""
    for least, size, unit in ((2 * 86400, 86400, "days"), (5400, 3600, "hours"), (90, 60, "minutes")):
        if seconds >= least:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


# Warnings for overrides that change training results.
OVERRIDE_WARNINGS = {
    "max_grad_norm=0": "max_grad_norm=0: gradients are not clipped: watch the loss, or set a lower optimizer.lr",
    "optimizer=adamw8bit": "optimizer=adamw8bit: its state is rounded to 8 bits, so losses differ slightly",
    "precision.master_dtype=bf16": "precision.master_dtype=bf16: small updates are lost in rounding, so losses differs",
}


def format_overrides(result: SearchResult) -> str:
    """Format the overrides of a search result."""
    if not result.words:
        limits = "" if result.plan.task.memory.activation_offloading else " without activation offloading"
        return f"fit: the config already is the fastest that fits{limits}"
    seconds = result.plan.step_time.seconds
    time_text = "" if seconds is None else f", {format_duration(seconds)} a step"
    away = f", {format_host_memory(result.plan)}" if result.plan.memory.host else ""
    summary = f"fit: {' '.join(result.words)}\n     {format_gib(result.plan.peak.total)} GiB at most{away}{time_text}"
    return "\n     ".join([summary, *(warning for word, warning in OVERRIDE_WARNINGS.items() if word in result.words)])


def format_gib(bytes: int) -> str:
    """Format bytes as GiB with three digits."""
    size = bytes / GIB
    if abs(size) < 0.005:
        return "-"
    return f"{size:,.0f}" if abs(size) >= 100 else f"{size:.1f}" if abs(size) >= 10 else f"{size:.2f}"


def format_table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Format rows as aligned columns. Columns in `left` are left-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    cells = ([f"{cell:{'<' if i in left else '>'}{widths[i]}}" for i, cell in enumerate(row)] for row in rows)
    return ["  ".join(line).rstrip() for line in cells]


def report_json(plan: Estimate, changes: Sequence[Suggestion], result: SearchResult | None) -> dict[str, Any]:
    """The report as JSON data, in bytes and seconds."""
    step_time = plan.step_time
    data: dict[str, Any] = {
        "model": plan.task.source.name,
        "machine": plan.machine.label,
        "sharing": asdict(plan.sizes),
        "phases": {n: {"total": m.total, "where": m.where, **m.parts} for n, m in plan.memory.phases.items()},
        "peak": plan.peak.total,
        "largest": largest_component(plan.memory),
        "host": plan.memory.host,
        "fits": plan.fits,
        "changes": [{"words": c.words, "does": c.does, "saves": c.saves} for c in changes],
        "traffic": [
            {"kind": f.kind, "what": f.tensors, "bytes": f.bytes, "ranks": f.ranks} for f in step_time.comm_volumes
        ],
        "tokens": plan.tokens,
        "steps": None if plan.step_count is None else plan.step_count.steps,
        "flops": step_time.flops,
        "seconds": step_time.seconds,
        "launches": step_time.launches,
        "hours": plan.hours,
        "cost": plan.cost,
    }
    if result is not None:
        data["fit"] = {
            "words": list(result.words),
            "peak": result.plan.peak.total,
            "seconds": result.plan.step_time.seconds,
        }
    return data
