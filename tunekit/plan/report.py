"""A plan in words, as a table of plain units, and as data."""

from collections.abc import Iterable, Sequence
from typing import Any

from tunekit.plan.estimate import Estimate
from tunekit.plan.hardware import GIB
from tunekit.plan.memory import PARTS, PHASES, MemoryEstimate
from tunekit.plan.search import SearchResult
from tunekit.plan.step_time import StepTime
from tunekit.plan.suggestions import Suggestion

ABOUT = {
    "load": "load the model",
    "forward": "forward pass",
    "backward": "backward pass",
    "step": "optimizer step",
    "save": "save",
}

NAMES = {
    "weights": "weights are",
    "beside": "the other model is",
    "gradients": "gradients are",
    "optimizer": "what the optimizer keeps is",
    "activations": "activations are",
    "logits": "logits and their gradients are",
    "gathered": "weights gathered from other ranks are",
    "other": "what comes and goes is",
    "process": "what is no tensor is",
}


def format_report(plan: Estimate, changes: Sequence[Suggestion]) -> str:
    """The whole report."""
    parts = [head(plan), memory(plan), verdict(plan, changes)]
    parts += [traffic(plan)] if plan.pace.flows else []
    parts += [time(plan), "\n".join(plan.task.untold)]
    return "\n\n".join(part for part in parts if part)


def head(plan: Estimate) -> str:
    """What is planned, and for what."""
    task, sizes = plan.task, plan.sizes
    books = plan.books
    every = [weight for unit in books.units for weight in unit]
    trained = sum(weight.trained * numbers(weight.shape) for weight in every)
    passes = "1 pass" if task.parts(sizes) == 1 else f"{task.parts(sizes)} passes"
    each = f"{task.micro(sizes)} pairs x 2" if task.each == 2 else str(task.micro(sizes))
    rows = f"{each} x {task.max_length:,} tokens in a pass, {passes} a step"
    shares = {name: vars(sizes)[name] for name in ("dp_replicate", "dp_shard", "cp", "tp", "ep")}
    shared = ", ".join(f"{name} {count}" for name, count in shares.items() if count > 1)
    where = f"{task.source.name} on {plan.machine.label}"
    lines = [where, f"each rank: {rows}" if plan.machine.devices > 1 else rows]
    lines[1] += f"; {trained:,} weights are trained" if max(sizes.tp, sizes.ep) == 1 else ""
    return "\n".join([*lines, *([f"shared as: {shared}"] if shared else [])])


def numbers(shape: Iterable[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def memory(plan: Estimate) -> str:
    """Each phase at its highest, and what it is made of."""
    room = plan.room
    columns = [part for part in PARTS if any(moment.parts.get(part) for moment in room.phases.values())]
    rows = [["GiB of each rank" if plan.machine.devices > 1 else "GiB", "in all", *columns]]
    for name in PHASES:
        moment = room.phases[name]
        rows.append(
            [ABOUT[name], format_gib(moment.total), *(format_gib(moment.parts.get(part, 0)) for part in columns)]
        )
    lines = table(rows)
    if room.host:
        lines.append(f"and {format_gib(room.host * plan.machine.per_host)} GiB of the memory of each host")
    return "\n".join(lines)


def verdict(plan: Estimate, changes: Sequence[Suggestion]) -> str:
    """Whether it fits, what is largest, and what to change."""
    room, peak = plan.room, plan.peak
    part = largest_component(room)
    at = f"{ABOUT[room.phase]} ({peak.where})" if peak.where not in ABOUT[room.phase] else ABOUT[room.phase]
    share = peak.parts[part] / peak.total
    lines = [f"at most {format_gib(peak.total)} GiB, in the {at}; {NAMES[part]} {share:.0%} of it"]
    if plan.fits is not None:
        assert plan.machine.memory is not None
        free = plan.machine.memory - peak.total
        lines[0] += (
            f"\nfits: {format_gib(free)} GiB are left"
            if free >= 0
            else f"\ndoes not fit: {format_gib(-free)} GiB are lacking"
        )
    if changes:
        lines.append("\nto need less")
        lines += format_suggestions(plan, changes)
    return "\n".join(lines)


def format_suggestions(plan: Estimate, changes: Sequence[Suggestion]) -> list[str]:
    """A line for each change."""
    return table([[f"  {c.words}", f"-{format_gib(c.saves)} GiB", tradeoff(plan, c)] for c in changes], left=(0, 2))


def tradeoff(plan: Estimate, change: Suggestion) -> str:
    """What a change does, and to the time of a step."""
    now, then = plan.pace.seconds, change.plan.pace.seconds
    slower = "" if not now or then is None or abs(then / now - 1) < 0.02 else f" ({then / now - 1:+.0%} time)"
    return change.does + slower


def largest_component(room: MemoryEstimate) -> str:
    """The part that takes most at the highest moment."""
    parts = room.peak.parts
    return max(parts, key=lambda name: parts[name])


def traffic(plan: Estimate) -> str:
    """What each rank sends in a step."""
    rows = [["sent by each rank in a step", "GiB", "ranks", "GB/s", "seconds"]]
    for flow in plan.pace.flows:
        speed = plan.machine.bandwidth(flow.ranks, flow.stride)
        known = [] if speed == float("inf") else [f"{speed / 1e9:.0f}", f"{flow.bytes / speed:.2f}"]
        rows.append([f"{flow.kind}: {flow.what}", format_gib(flow.bytes), str(flow.ranks), *(known or ["", ""])])
    return "\n".join(table(rows))


def time(plan: Estimate) -> str:
    """How long, how much."""
    pace = plan.pace
    lines = [f"{plan.tokens:,} tokens a step, {pace.flops / 1e12:,.1f} TFLOP on each rank"]
    if pace.seconds is not None and pace.computing is not None:
        kind = plan.machine.kind
        assert kind is not None
        lines.append(f"about {span(pace.seconds)} a step{spent(pace)}, {plan.tokens / pace.seconds:,.0f} tokens/s")
        guess = " (no kind is named; --gpu-type says which)" if plan.machine.taken else ""
        rate = kind.rate(plan.task.precision.compute_dtype)
        lines.append(f"if {plan.machine.reached:.0%} of the {rate:,.0f} TFLOP/s of one {kind.label} are reached{guess}")
        if pace.seconds == pace.launching:
            lines.append(f"limited by the host, which launches {pace.launches:,} kernels: longer passes cost little")
    lines.append(whole(plan))
    if plan.cost is not None:
        unit = "" if plan.extent is not None else " a step"
        sum = f"{plan.cost:,.2f}" if plan.cost >= 1 else f"{plan.cost:.2g}"
        lines.append(f"costs {sum}{unit}, at {plan.machine.price:g} a device and hour")
    return "\n".join(lines)


def whole(plan: Estimate) -> str:
    """What all steps come to."""
    found = plan.extent
    if found is None:
        return "how many steps is not known before the rows are here: say max_steps=, or name rows of this machine"
    about = "" if found.exact else "about "
    told = f"{about}{found.steps:,} step{'s' * (found.steps != 1)}"
    if found.rows is not None:
        epochs = f"{found.epochs:,} epoch{'s' * (found.epochs > 1)} of "
        told += f" ({epochs}{found.rows:,} rows{'' if found.exact else ', packed'})"
    told += f", {about or 'at most '}{found.steps * plan.tokens:,} tokens"
    return told if plan.hours is None else f"{told}: {span(3600 * plan.hours)}"


def spent(pace: StepTime) -> str:
    """What a step's time goes into, as far as it is seen."""
    assert pace.seconds is not None and pace.computing is not None
    parts = {
        "products": pace.computing,
        "sent beside them": pace.hidden,
        "to the host and back beside them": pace.hosted,
        "waited for": pace.waiting,
        "optimizer": pace.moving,
        "kernel launches": pace.launching,
    }
    told = [f"{name} {span(seconds)}" for name, seconds in parts.items() if seconds >= 0.01 * pace.seconds]
    return f" ({', '.join(told)})" if told else ""


def span(seconds: float) -> str:
    """A time in the unit that people would take."""
    for least, size, unit in ((2 * 86400, 86400, "days"), (5400, 3600, "hours"), (90, 60, "minutes")):
        if seconds >= least:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


# Overrides of a fit that change what is learnt, and not only where and when it is computed.
LEARNT = {
    "max_grad_norm=0": "max_grad_norm=0: gradients are no longer cut at a length, so watch the loss, or set a "
    "lower optimizer.lr",
    "optimizer=adamw8bit": "optimizer=adamw8bit: its moments are rounded to 8 bits, so the course differs a little",
    "precision.master_dtype=bf16": "precision.master_dtype=bf16: small steps are lost in rounding, so the course "
    "differs",
}


def format_overrides(found: SearchResult) -> str:
    """The overrides of what fits."""
    if not found.words:
        return "fit: of what fits nothing is faster than what the config says"
    seconds = found.plan.pace.seconds
    told = "" if seconds is None else f", {span(seconds)} a step"
    host = found.plan.room.host * found.plan.machine.per_host
    away = f", {format_gib(host)} GiB of the memory of each host" if host else ""
    text = f"fit: {' '.join(found.words)}\n     {format_gib(found.plan.peak.total)} GiB at most{away}{told}"
    return "\n     ".join([text, *(said for word, said in LEARNT.items() if word in found.words)])


def format_gib(bytes: int) -> str:
    """Three digits."""
    size = bytes / GIB
    if abs(size) < 0.005:
        return "-"
    return f"{size:,.0f}" if abs(size) >= 100 else f"{size:.1f}" if abs(size) >= 10 else f"{size:.2f}"


def table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Columns, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    cells = ([f"{cell:{'<' if i in left else '>'}{widths[i]}}" for i, cell in enumerate(row)] for row in rows)
    return ["  ".join(line).rstrip() for line in cells]


def report_json(plan: Estimate, changes: Sequence[Suggestion], found: SearchResult | None) -> dict[str, Any]:
    """The same for programs: bytes and seconds."""
    pace = plan.pace
    told: dict[str, Any] = {
        "model": plan.task.source.name,
        "machine": plan.machine.label,
        "sharing": {name: vars(plan.sizes)[name] for name in ("dp_replicate", "dp_shard", "cp", "tp", "ep")},
        "phases": {n: {"total": m.total, "where": m.where, **m.parts} for n, m in plan.room.phases.items()},
        "peak": plan.peak.total,
        "largest": largest_component(plan.room),
        "host": plan.room.host,
        "fits": plan.fits,
        "changes": [{"words": c.words, "does": c.does, "saves": c.saves} for c in changes],
        "traffic": [{"kind": f.kind, "what": f.what, "bytes": f.bytes, "ranks": f.ranks} for f in pace.flows],
        "tokens": plan.tokens,
        "steps": None if plan.extent is None else plan.extent.steps,
        "flops": pace.flops,
        "seconds": pace.seconds,
        "launches": pace.launches,
        "hours": plan.hours,
        "cost": plan.cost,
    }
    if found is not None:
        told["fit"] = {"words": list(found.words), "peak": found.plan.peak.total, "seconds": found.plan.pace.seconds}
    return told
