"""Where the time of steps went, from the events of a trace as torch.profiler writes them. Nothing but arithmetic.

Times are spans from a beginning to an end. On a GPU its kernels are what counts, on a CPU the operations of torch;
exchanges are kernels of NCCL, and there and on a CPU what gloo's own threads do.
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

STEP, MOVE = "ProfilerStep#", "Optimizer.step#"
ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
NO_WORK = {"c10d", "autograd", "profiler", "record_param_comms"}  # namespaces of what calls, waits or wraps
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
SIZES = {"double": 8, "long int": 8, "long": 8, "float": 4, "int": 4, "bfloat16": 2, "half": 2}  # others: one byte
MICRO = 1e-6
SHOWN = 10


@dataclass(frozen=True)
class CommStats:
    """One kind of exchange: `bytes` of whole tensors, the seconds they were on their way."""

    kind: str
    calls: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class OpStats:
    name: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class StepTimeBreakdown:
    """Seconds of all steps of a trace. Those from `compute` to `other` add up to `total`."""

    steps: int
    total: float
    compute: float  # without the optimizer
    optimizer: float
    exposed: float  # exchanges while nothing is computed
    data: float  # waiting for rows while nothing is computed
    other: float  # neither: on a GPU mostly Python that comes too late, on a CPU what is between operations
    hidden: float  # exchanges behind compute
    exchanges: tuple[CommStats, ...]
    operations: tuple[OpStats, ...]


# Spans


def union(spans: Iterable[Span]) -> Spans:
    """The same time in spans that are in order and do not touch."""
    found: Spans = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif end > start:
            found.append((start, end))
    return found


def both(a: Spans, b: Spans) -> Spans:
    """The time that is in both of two unions."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if end > start:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def minus(a: Spans, b: Spans) -> Spans:
    """The time of one union that is not in another."""
    bounds = [-math.inf, *(bound for span in b for bound in span), math.inf]
    return both(a, list(zip(bounds[::2], bounds[1::2], strict=True)))


def length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)


# Events


def step_breakdown(events: Iterable[Event]) -> StepTimeBreakdown:
    """Of the steps that a trace holds whole; all zero if there is none."""
    events = [event for event in events if event.get("ph") == "X"]
    steps = [e for e in events if e["name"].startswith(STEP) and e["cat"] != "gpu_user_annotation" and e["dur"]]
    within = union(map(span, steps))
    events = [event for event in events if both([span(event)], within)]
    work = working(events)
    travel = exchanging(events)
    ops, sent = both(union(map(span, work)), within), both(union(map(span, travel)), within)
    exposed, moving = minus(sent, ops), both(moves(events, ops), within)
    compute, optimizer = minus(ops, moving), minus(moving, exposed)
    waits = both(union(span(e) for e in events if e["name"] == DATA_WAIT and e["cat"] != "gpu_user_annotation"), within)
    data = minus(waits, union([*compute, *optimizer, *exposed]))
    shares = [length(part) * MICRO for part in (compute, optimizer, exposed, data)]
    total = length(within) * MICRO
    return StepTimeBreakdown(
        len(steps),
        total,
        *shares,
        other=max(total - sum(shares), 0.0),
        hidden=length(both(sent, ops)) * MICRO,
        exchanges=tuple(exchanges(events)),
        operations=tuple(largest(work)),
    )


def span(event: Event) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def on_gpu(events: Iterable[Event]) -> bool:
    return any(event["cat"] in ON_GPU for event in events)


def is_nccl(event: Event) -> bool:
    return event["cat"] == "kernel" and event["name"].startswith("nccl")


def is_gloo(event: Event) -> bool:
    return event["name"].startswith("gloo:") and event["cat"] != "gpu_user_annotation"


def working(events: Sequence[Event]) -> list[Event]:
    """What computes: kernels, or the operations that no other contains."""
    if on_gpu(events):
        return [event for event in events if event["cat"] in ON_GPU and not is_nccl(event)]
    senders = {event["tid"] for event in events if is_gloo(event)}
    return list(outermost(e for e in events if e["cat"] == "cpu_op" and e["tid"] not in senders and is_work(e["name"])))


def is_work(name: str) -> bool:
    """Whether a name of a CPU's trace is an operation. Others wrap, and may wait for an exchange inside."""
    space, colons, _ = name.partition("::")
    return name.startswith(COMPILED) or bool(colons) and space not in NO_WORK


def outermost(events: Iterable[Event]) -> Iterator[Event]:
    """Those that lie in no other of the same thread."""
    ends: dict[Any, float] = defaultdict(lambda: -math.inf)
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        start, end = span(event)
        if start >= ends[event["tid"]]:
            ends[event["tid"]] = end
            yield event


def exchanging(events: Sequence[Event]) -> list[Event]:
    """What sends and receives. On a CPU the call itself may be the exchange; on a GPU it only puts it into a queue."""
    calls = [] if on_gpu(events) else [event for event in events if event["name"].startswith("c10d::")]
    return calls + [event for event in events if is_nccl(event) or is_gloo(event)]


def moves(events: Sequence[Event], ops: Spans) -> Spans:
    """When the optimizer is at work."""
    kind = "gpu_user_annotation" if on_gpu(events) else "user_annotation"
    named = union(span(event) for event in events if event["cat"] == kind and event["name"].startswith(MOVE))
    return both(named, ops) if on_gpu(events) else named


def largest(work: Iterable[Event]) -> list[OpStats]:
    """The operations that took most time in all."""
    found = defaultdict(list)
    for event in work:
        found[event["name"]].append(event["dur"] * MICRO)
    sums = [OpStats(name, len(each), sum(each)) for name, each in found.items()]
    return sorted(sums, key=lambda one: -one.seconds)[:SHOWN]


# Exchanges


def exchanges(events: Sequence[Event]) -> list[CommStats]:
    """Each kind with its sums, the longest first."""
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for kind, size, seconds in (*of_nccl(events), *of_gloo(events)):
        found[kind].append((size, seconds))
    sums = [CommStats(k, len(one), sum(s for s, _ in one), sum(t for _, t in one)) for k, one in found.items()]
    return sorted(sums, key=lambda one: -one.seconds)


def of_nccl(events: Iterable[Event]) -> Iterator[tuple[str, int, float]]:
    """Kind, bytes and seconds of each kernel."""
    for event in filter(is_nccl, events):
        args = event.get("args", {})
        counts = [int(args[name]) for name in ("In msg nelems", "Out msg nelems") if name in args]
        name = args.get("Collective name", event["name"])
        yield kind_of(name), max(counts, default=0) * size_of(args.get("dtype", "")), event["dur"] * MICRO


def of_gloo(events: Iterable[Event]) -> Iterator[tuple[str, int, float]]:
    """The same of what gloo did, which knows less of it than the call: it makes a reduce-scatter of an all-reduce."""
    calls = sorted((event for event in events if event["name"].startswith("c10d::")), key=span)
    for event in sorted(filter(is_gloo, events), key=span):
        sizes = numels(event)
        call = next((c for c in calls if c["ts"] <= event["ts"] and set(sizes) <= set(numels(c))), None)
        if call is not None:
            calls.remove(call)
        numbers = max([0, *sizes, *(numels(call) if call else ())])
        size = size_of(*event.get("args", {}).get("Input type", ["byte"])[:1])
        yield kind_of((call or event)["name"]), numbers * size, event["dur"] * MICRO


def numels(event: Event) -> list[int]:
    """How many numbers each tensor of a call has."""
    return [math.prod(shape) for shape in shapes(event.get("args", {}).get("Input Dims", []))]


def shapes(dims: list[Any]) -> Iterator[list[int]]:
    """Shapes in lists of lists of them; what is no tensor has an empty one."""
    for one in dims:
        if one and isinstance(one[0], list):
            yield from shapes(one)
        elif one:
            yield one


def kind_of(name: str) -> str:
    found = (kind for kind, pattern in KINDS.items() if re.search(pattern, name.lower()))
    return next(found, name)


def size_of(dtype: str) -> int:
    """Bytes of a number, as a trace names its type."""
    return SIZES.get(dtype.lower().removeprefix("c10::"), 1)
