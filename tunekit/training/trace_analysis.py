"""Step time breakdown from the events of a torch.profiler trace.

Times are spans (start, end) in microseconds. Compute is kernels on a GPU and operators on a CPU. Communication is NCCL
kernels, the work of gloo's own threads, and on a CPU the collective calls.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tunekit.data.dataloader.prefetch import DATA_WAIT

Event = dict[str, Any]
Span = tuple[float, float]
Spans = list[Span]

STEP, OPTIMIZER = "ProfilerStep#", "Optimizer.step#"
GPU_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}
NO_COMPUTE = {"c10d", "autograd", "profiler", "record_param_comms"}  # namespaces of calls that wait or wrap others
COMPILED = ("Torch-Compiled Region", "CompiledFunction")
KINDS = {
    "all-gather": r"all_?gather",
    "reduce-scatter": r"reduce_?scatter",
    "all-reduce": r"all_?reduce",
    "all-to-all": r"all_?to_?all",
    "broadcast": r"broadcast",
    "send": r"send|recv",
    "barrier": r"barrier",
}
SIZES = {"double": 8, "long int": 8, "long": 8, "float": 4, "int": 4, "bfloat16": 2, "half": 2}  # else 1
SECONDS_PER_US = 1e-6
MAX_OPS = 10


@dataclass(frozen=True)
class CallStats:
    """One operator or one kind of collective: number of calls, bytes of the full tensors of collectives, seconds."""

    name: str
    calls: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class StepTimeBreakdown:
    """Seconds over all steps of a trace. `compute`, `optimizer`, `exposed`, `data` and `other` add up to `total`."""

    steps: int
    total: float
    compute: float  # without the optimizer
    optimizer: float
    exposed: float  # communication without concurrent compute
    data: float  # waiting for the data loader without concurrent compute
    other: float  # on a GPU mostly late launches by Python, on a CPU the time between operators
    hidden: float  # communication that overlaps with compute
    collectives: tuple[CallStats, ...]
    ops: tuple[CallStats, ...]


# Spans


def union(spans: Iterable[Span]) -> Spans:
    """The union of spans: sorted and disjoint."""
    merged: Spans = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif end > start:
            merged.append((start, end))
    return merged


def intersect(a: Spans, b: Spans) -> Spans:
    """The intersection of two unions."""
    result, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if end > start:
            result.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return result


def subtract(a: Spans, b: Spans) -> Spans:
    """The part of union `a` that is not in union `b`."""
    bounds = [-math.inf, *(bound for span in b for bound in span), math.inf]
    return intersect(a, list(zip(bounds[::2], bounds[1::2], strict=True)))


def total_length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)


# Events


def step_breakdown(events: Iterable[Event]) -> StepTimeBreakdown:
    """The breakdown of the complete steps of a trace; all zero if there are none."""
    events = [event for event in events if event.get("ph") == "X"]
    steps = [e for e in events if e["name"].startswith(STEP) and e["cat"] != "gpu_user_annotation" and e["dur"]]
    within = union(map(span, steps))
    events = [event for event in events if intersect([span(event)], within)]
    compute_list = compute_events(events)
    busy, comm = (intersect(union(map(span, part)), within) for part in (compute_list, comm_events(events)))
    exposed, updates = subtract(comm, busy), intersect(optimizer_spans(events, busy), within)
    compute, optimizer = subtract(busy, updates), subtract(updates, exposed)
    waits = union(span(e) for e in events if e["name"] == DATA_WAIT and e["cat"] != "gpu_user_annotation")
    data = subtract(intersect(waits, within), union([*compute, *optimizer, *exposed]))
    seconds = [total_length(spans) * SECONDS_PER_US for spans in (compute, optimizer, exposed, data)]
    total = total_length(within) * SECONDS_PER_US
    return StepTimeBreakdown(
        len(steps),
        total,
        *seconds,
        other=max(total - sum(seconds), 0.0),
        hidden=total_length(intersect(comm, busy)) * SECONDS_PER_US,
        collectives=sum_calls((*nccl_ops(events), *gloo_ops(events))),
        ops=sum_calls((event["name"], 0, event["dur"] * SECONDS_PER_US) for event in compute_list)[:MAX_OPS],
    )


def span(event: Event) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def on_gpu(events: Iterable[Event]) -> bool:
    return any(event["cat"] in GPU_CATEGORIES for event in events)


def is_nccl(event: Event) -> bool:
    return event["cat"] == "kernel" and event["name"].startswith("nccl")


def is_gloo(event: Event) -> bool:
    return event["name"].startswith("gloo:") and event["cat"] != "gpu_user_annotation"


def compute_events(events: Sequence[Event]) -> list[Event]:
    """Compute events: GPU kernels, or the outermost operators on a CPU."""
    if on_gpu(events):
        return [event for event in events if event["cat"] in GPU_CATEGORIES and not is_nccl(event)]
    senders = {event["tid"] for event in events if is_gloo(event)}
    return list(
        outermost(e for e in events if e["cat"] == "cpu_op" and e["tid"] not in senders and is_compute(e["name"]))
    )


def is_compute(name: str) -> bool:
    """Whether a CPU event is an operator. Others are wrappers, which may wait for communication inside."""
    space, colons, _ = name.partition("::")
    return name.startswith(COMPILED) or bool(colons) and space not in NO_COMPUTE


def outermost(events: Iterable[Event]) -> Iterator[Event]:
    """Events that are inside no other event of the same thread."""
    ends: dict[Any, float] = defaultdict(lambda: -math.inf)
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        start, end = span(event)
        if start >= ends[event["tid"]]:
            ends[event["tid"]] = end
            yield event


def comm_events(events: Sequence[Event]) -> list[Event]:
    """Communication events. On a CPU the call may do the communication itself; on a GPU it only enqueues it."""
    calls = [] if on_gpu(events) else [event for event in events if event["name"].startswith("c10d::")]
    return calls + [event for event in events if is_nccl(event) or is_gloo(event)]


def optimizer_spans(events: Sequence[Event], ops: Spans) -> Spans:
    """Spans of optimizer steps."""
    kind = "gpu_user_annotation" if on_gpu(events) else "user_annotation"
    named = union(span(event) for event in events if event["cat"] == kind and event["name"].startswith(OPTIMIZER))
    return intersect(named, ops) if on_gpu(events) else named


def sum_calls(calls: Iterable[tuple[str, int, float]]) -> tuple[CallStats, ...]:
    """Statistics by name from the name, bytes and seconds of each call, those with the largest total time first."""
    by_name: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for name, size, seconds in calls:
        by_name[name].append((size, seconds))
    stats = [
        CallStats(name, len(values), sum(size for size, _ in values), sum(seconds for _, seconds in values))
        for name, values in by_name.items()
    ]
    return tuple(sorted(stats, key=lambda call: -call.seconds))


# Communication


def nccl_ops(events: Iterable[Event]) -> Iterator[tuple[str, int, float]]:
    """Kind, bytes and seconds of each NCCL kernel."""
    for event in filter(is_nccl, events):
        args = event.get("args", {})
        counts = [int(args[name]) for name in ("In msg nelems", "Out msg nelems") if name in args]
        name = args.get("Collective name", event["name"])
        yield kind_of(name), max(counts, default=0) * size_of(args.get("dtype", "")), event["dur"] * SECONDS_PER_US


def gloo_ops(events: Iterable[Event]) -> Iterator[tuple[str, int, float]]:
    """Kind, bytes and seconds of each gloo operation. Its call names the kind: gloo implements a reduce-scatter by an
    all-reduce."""
    calls = sorted((event for event in events if event["name"].startswith("c10d::")), key=span)
    for event in sorted(filter(is_gloo, events), key=span):
        sizes = tensor_sizes(event)
        call = next((c for c in calls if c["ts"] <= event["ts"] and set(sizes) <= set(tensor_sizes(c))), None)
        if call is not None:
            calls.remove(call)
        numbers = max([0, *sizes, *(tensor_sizes(call) if call else ())])
        size = size_of(*event.get("args", {}).get("Input type", ["byte"])[:1])
        yield kind_of((call or event)["name"]), numbers * size, event["dur"] * SECONDS_PER_US


def tensor_sizes(event: Event) -> list[int]:
    """Number of elements of each tensor argument of a call."""
    return [math.prod(shape) for shape in shapes(event.get("args", {}).get("Input Dims", []))]


def shapes(dims: list[Any]) -> Iterator[list[int]]:
    """All tensor shapes in nested lists; other arguments have an empty list."""
    for entry in dims:
        if entry and isinstance(entry[0], list):
            yield from shapes(entry)
        elif entry:
            yield entry


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name.lower())), name)


def size_of(dtype: str) -> int:
    """Bytes per element of a dtype name in a trace."""
    return SIZES.get(dtype.lower().removeprefix("c10::"), 1)
