"""Significance tests of the difference between two models on the same rows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tunekit.evaluation.results import Metric, ModelResult

NUM_RESAMPLES = 10_000
BLOCK_SIZE = 2**15  # rows drawn at once: a call of numpy per resample would take most of the time
CONFIDENCE = 0.95


@dataclass(frozen=True)
class PairedDifference:
    """Difference of a metric between two models, with its 95% confidence interval.

    For binary metrics, `won` and `lost` are the rows that only the second, and only the first model has right, and
    `chance` is the p-value of McNemar's test: the probability of such an uneven split if the models are equally good.
    """

    task: str
    name: str
    difference: float
    low: float
    high: float
    better: bool | None  # None: not significant
    won: tuple[int, ...] | None = None
    lost: tuple[int, ...] | None = None
    chance: float | None = None


def paired_differences(before: ModelResult, after: ModelResult, seed: int = 0) -> list[PairedDifference]:
    """Differences of all metrics that were computed on the same rows."""
    baseline = before.metrics
    pairs = ((key[0], baseline[key], metric) for key, metric in after.metrics.items() if key in baseline)
    differences = (compare_metric(task, first, second, seed) for task, first, second in pairs)
    return [difference for difference in differences if difference is not None]


def compare_metric(task: str, before: Metric, after: Metric, seed: int = 0) -> PairedDifference | None:
    """The same metric of two models; None if rows or weights (numbers of tokens) differ."""
    if not before.values or (before.rows, before.weights) != (after.rows, after.weights):
        return None
    low, high = bootstrap_interval(before, after, seed)
    won = lost = chance = None
    is_significant = low > 0 or high < 0
    if before.is_binary and after.is_binary:
        pairs = list(zip(before.values, after.values, strict=True))
        won = tuple(row for row, (first, second) in enumerate(pairs) if first < second)
        lost = tuple(row for row, (first, second) in enumerate(pairs) if first > second)
        chance = mcnemar(len(won), len(lost))
        is_significant = chance < 1 - CONFIDENCE
    difference = after.value - before.value
    is_clear = is_significant and after.higher_is_better is not None
    better = (difference > 0) == after.higher_is_better if is_clear else None
    return PairedDifference(task, before.name, difference, low, high, better, won, lost, chance)


def bootstrap_interval(before: Metric, after: Metric, seed: int) -> tuple[float, float]:
    """Confidence interval of the difference: paired percentile bootstrap over rows (Efron 1979)."""
    weights = np.asarray(before.weights)
    gains = np.asarray(after.values) - np.asarray(before.values)
    generator = np.random.default_rng(seed)
    differences, count = np.empty(NUM_RESAMPLES), max(1, BLOCK_SIZE // len(gains))
    for start in range(0, NUM_RESAMPLES, count):
        rows = generator.integers(len(gains), size=(min(count, NUM_RESAMPLES - start), len(gains)))
        differences[start : start + count] = gains[rows].sum(1) / np.maximum(weights[rows].sum(1), 1e-9)
    low, high = np.quantile(differences, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def mcnemar(won: int, lost: int) -> float:
    """Two-sided p-value of McNemar's exact test (1947)."""
    count, minority = won + lost, min(won, lost)
    log_binomials: Sequence[float] = [
        math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1) for k in range(minority + 1)
    ]
    return min(1.0, 2 * math.fsum(math.exp(log - count * math.log(2)) for log in log_binomials))
