"""Whether two models differ, or only the rows that they happened to be asked: each row is compared with itself."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tunekit.evaluation.results import Metric, ModelResult

DRAWS = 10_000  # of the rows, with some of them again and others not at all
SURE = 0.95  # share of the draws that an interval holds


@dataclass(frozen=True)
class PairedDifference:
    """From one model to another: the difference, and between which bounds it lies in 95 of 100 draws of the rows.

    `won` and `lost` are rows that only the second, and only the first, has right; `chance` is how often so uneven a
    split would come of two models that are equally good.
    """

    task: str
    name: str
    difference: float
    low: float
    high: float
    better: bool | None  # None: it may be noise
    won: tuple[int, ...] | None = None
    lost: tuple[int, ...] | None = None
    chance: float | None = None


def paired_differences(before: ModelResult, after: ModelResult, seed: int = 0) -> list[PairedDifference]:
    """What has changed from one model to another, in each figure that comes of the same rows."""
    known = before.figures
    pairs = ((name, known[name], figure) for name, figure in after.figures.items() if name in known)
    found = (compared(task, one, other, seed) for (task, _), one, other in pairs)
    return [change for change in found if change is not None]


def compared(task: str, before: Metric, after: Metric, seed: int = 0) -> PairedDifference | None:
    """The same figure of two models; None if it does not come of the same rows, one by one, in as many tokens."""
    if not before.values or (before.rows, before.weights) != (after.rows, after.weights):
        return None
    low, high = bounds(before, after, seed)
    won = lost = chance = None
    sure = low > 0 or high < 0
    if before.counted and after.counted:
        pairs = list(zip(before.values, after.values, strict=True))
        won = tuple(row for row, (one, other) in enumerate(pairs) if one < other)
        lost = tuple(row for row, (one, other) in enumerate(pairs) if one > other)
        chance = mcnemar(len(won), len(lost))
        sure = chance < 1 - SURE
    difference = after.value - before.value
    better = (difference > 0) == after.higher if sure and after.higher is not None else None
    return PairedDifference(task, before.name, difference, low, high, better, won, lost, chance)


def bounds(before: Metric, after: Metric, seed: int) -> tuple[float, float]:
    """An interval of the difference, by drawing rows anew in pairs: the percentile bootstrap (Efron 1979)."""
    weights = np.asarray(before.weights)
    gains = np.asarray(after.values) - np.asarray(before.values)
    draw = np.random.default_rng(seed)
    found = np.empty(DRAWS)
    for i in range(DRAWS):
        rows = draw.integers(len(gains), size=len(gains))
        found[i] = gains[rows].sum() / max(weights[rows].sum(), 1e-9)
    low, high = np.quantile(found, [(1 - SURE) / 2, (1 + SURE) / 2])
    return float(low), float(high)


def mcnemar(won: int, lost: int) -> float:
    """How often equally good models would disagree at least so unevenly: McNemar's exact test (1947)."""
    count, few = won + lost, min(won, lost)
    logs: Sequence[float] = [
        math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1) for k in range(few + 1)
    ]
    return min(1.0, 2 * math.fsum(math.exp(log - count * math.log(2)) for log in logs))
