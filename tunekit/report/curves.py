"""Curves of the metrics of several runs: which metrics share a chart, their groups, and fewer points for long runs."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from tunekit.report.run_files import Lines, RunFiles

MAX_POINTS = 2000  # of a curve
MAX_TOTAL_POINTS = 90_000  # of a page, about 1.3 MB
MIN_POINTS = 100
DIGITS = 5
# Groups by the names of metrics: the first that matches. Metrics of held-out rows are in the chart of their training
# metric, if there is one.
GROUPS = (
    ("Loss", r"(eval/)?(.*/)?(.*_)?loss"),
    ("Throughput", r".*(tokens_per_second|_time|num_tokens|num_target_tokens|samples_per_second)"),
    ("Memory", r".*memory.*|num_alloc_retries"),
    ("Rewards and episodes", r"(eval/)?(reward|advantage|kl|entropy|episode|completion|answer|turn|num_turns|tool).*"),
    ("Rewards and episodes", r".*(kl|entropy|reward|logprob|logps|ratio|margin|accurac).*(?<!eval)"),
    ("Evaluation", r"(eval|forgetting)/.*"),
    ("Optimization", r".*(lr|grad_norm|loss_scale|num_overflows|clip).*"),
)
OTHER = "Other metrics"
GROUP_ORDER = ("Loss", "Evaluation", "Rewards and episodes", "Optimization", "Throughput", "Memory", OTHER)
UNITS = (("B", r"(peak_)?memory.*(?<!fragmentation)"), ("s", r".*_time"))
HIDDEN = re.compile(r"verify/.*|step")  # values of the final checkpoint


@dataclass(frozen=True)
class Curve:
    """Values of a metric of one run over its steps. None: not finite."""

    run: int
    metric: str
    steps: Sequence[int]
    values: Sequence[float | None]

    def to_dict(self) -> dict[str, Any]:
        """JSON-serializable form."""
        is_eval = self.metric.startswith("eval/")
        return {"run": self.run, "eval": is_eval, "steps": list(self.steps), "values": list(self.values)}


@dataclass
class Chart:
    """Curves of one metric, of all runs."""

    metric: str
    curves: list[Curve] = field(default_factory=list)

    @property
    def group(self) -> str:
        return next((title for title, pattern in GROUPS if re.fullmatch(pattern, self.metric)), OTHER)

    def to_dict(self) -> dict[str, Any]:
        """JSON-serializable form."""
        return {
            "metric": self.metric,
            "unit": find_unit(self.metric),
            "curves": [curve.to_dict() for curve in self.curves],
        }


def make_charts(runs: Sequence[RunFiles]) -> list[tuple[str, list[Chart]]]:
    """Charts by group. All curves of a page have at most `MAX_TOTAL_POINTS` points."""
    curves = [curve for number, run in enumerate(runs) for curve in read_curves(run.lines, number)]
    limit = max(MIN_POINTS, min(MAX_POINTS, MAX_TOTAL_POINTS // max(len(curves), 1)))
    names = {curve.metric for curve in curves}
    charts: dict[str, Chart] = {}
    for curve in curves:
        name = curve.metric.removeprefix("eval/")
        name = name if name in names else curve.metric
        charts.setdefault(name, Chart(name)).curves.append(downsample(curve, limit))
    ordered = sorted(charts.values(), key=lambda chart: GROUP_ORDER.index(chart.group))
    return [(title, list(members)) for title, members in groupby(ordered, lambda chart: chart.group)]


def read_curves(lines: Lines, run: int) -> Iterator[Curve]:
    """Curves of all metrics, in the order in which they first appear."""
    points: dict[str, dict[int, float | None]] = {}
    for line in lines:
        for name, value in line.items():
            if not HIDDEN.fullmatch(name) and (value is None or is_number(value)):
                points.setdefault(name, {})[line["step"]] = value
    for name, values in points.items():
        steps = sorted(values)
        yield Curve(run, name, steps, [values[step] for step in steps])


def find_unit(metric: str) -> str:
    """Unit of a metric: bytes (B), seconds (s), or none."""
    return next((unit for unit, pattern in UNITS if re.fullmatch(pattern, metric)), "")


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def downsample(curve: Curve, limit: int) -> Curve:
    """The smallest and the largest value of each of `limit / 2` ranges of steps, and the ends; digits are rounded."""
    values = np.array([np.nan if value is None else value for value in curve.values], float)
    indices: Iterable[int] = range(len(values))
    if len(values) > limit:
        size = -(-len(values) // (limit // 2 - 1))
        rows = np.pad(values, (0, -len(values) % size), constant_values=np.nan).reshape(-1, size)
        starts, is_nan = np.arange(len(rows)) * size, np.isnan(rows)
        lowest = starts + np.where(is_nan, np.inf, rows).argmin(1)  # the first one of a range without values
        highest = starts + np.where(is_nan, -np.inf, rows).argmax(1)
        indices = np.unique([0, *lowest, *highest, len(values) - 1]).tolist()
    return Curve(
        curve.run, curve.metric, [curve.steps[i] for i in indices], [round_digits(curve.values[i]) for i in indices]
    )


def round_digits(value: float | None) -> float | None:
    """A value with as many digits as a chart can show. Integers stay integers, which are shorter."""
    if value is None:
        return None
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 2**53 else rounded
