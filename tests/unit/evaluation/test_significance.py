"""Comparison of two models: standard statistical tests, and noise that is not reported as a change."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from tunekit.evaluation.results import Metric, ModelResult, TaskResult
from tunekit.evaluation.significance import bootstrap_interval, compare_metric, mcnemar, paired_differences
from tunekit.evaluation.table import results_table


@pytest.mark.parametrize(("won", "lost"), [(0, 0), (3, 0), (1, 9), (12, 7), (40, 40), (500, 430)])
def test_mcnemar_matches_the_binomial_test(won: int, lost: int) -> None:
    expected = stats.binomtest(won, won + lost).pvalue if won + lost else 1.0
    assert mcnemar(won, lost) == pytest.approx(expected, rel=1e-6)


def test_bootstrap_interval_matches_the_paired_t_test() -> None:
    rng = np.random.default_rng(0)
    first = rng.normal(size=400)
    second = first + rng.normal(0.1, 0.5, size=400)
    low, high = bootstrap_interval(Metric.mean("loss", [*first]), Metric.mean("loss", [*second]), seed=1)
    expected = stats.ttest_rel(second, first).confidence_interval(0.95)
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=0.01)
    assert bootstrap_interval(Metric.mean("loss", [*first]), Metric.mean("loss", [*second]), seed=1) == (low, high)


def test_rows_are_weighted_by_tokens() -> None:
    """50 rows of ten tokens lose a nat per row, and 50 rows of one token gain ten."""
    tokens = [10.0, 1.0] * 50
    before = Metric.mean("loss", tokens, tokens, higher_is_better=False)
    after = Metric.mean("loss", [count + (1 if count > 1 else -10) for count in tokens], tokens, higher_is_better=False)
    change = compare_metric("rows", before, after)
    assert change is not None
    assert change.difference == pytest.approx(-9 * 50 / (11 * 50))
    assert change.better is True
    assert change.low < change.difference < change.high < 0


def test_noise_is_rarely_significant() -> None:
    rng, num_significant = np.random.default_rng(0), 0
    for _ in range(40):
        first, second = ((rng.random(50) < 0.6).astype(float).tolist() for _ in range(2))
        change = compare_metric("rows", Metric.mean("acc", first), Metric.mean("acc", second))
        assert change is not None
        assert change.won == tuple(i for i in range(50) if second[i] > first[i])
        assert change.lost == tuple(i for i in range(50) if second[i] < first[i])
        num_significant += change.better is not None
    assert num_significant <= 4


def test_different_rows_are_not_compared() -> None:
    three, four = Metric.mean("acc", [1.0, 0.0, 1.0]), Metric.mean("acc", [1.0, 0.0, 1.0, 1.0])
    assert compare_metric("rows", three, four) is None
    assert compare_metric("rows", Metric("word_perplexity", 9.0), Metric("word_perplexity", 8.0)) is None
    first, second = (Metric.mean("loss", [1.0], [tokens]) for tokens in (3.0, 4.0))
    assert compare_metric("rows", first, second) is None
    results = [
        ModelResult(name, (TaskResult("rows", (metric,)),)) for name, metric in (("base", first), ("tuned", second))
    ]
    assert results_table(results, []).endswith("not compared: other rows or tokens")


def test_rows_are_matched_by_identity() -> None:
    """Other rows, or the same rows in another order, are not compared."""
    values = [1.0, 0.0, 1.0]

    def make_metric(*rows: str) -> Metric:
        return Metric.mean("acc", values, rows=rows)

    first = make_metric("a.jsonl:1", "a.jsonl:2", "a.jsonl:3")
    assert compare_metric("rows", first, make_metric("a.jsonl:1", "a.jsonl:2", "a.jsonl:3")) is not None
    for second in (
        make_metric("b.jsonl:1", "b.jsonl:2", "b.jsonl:3"),
        make_metric("a.jsonl:1", "a.jsonl:3", "a.jsonl:2"),
    ):
        assert compare_metric("rows", first, second) is None
        results = [
            ModelResult(name, (TaskResult("rows", (metric,)),)) for name, metric in (("base", first), ("tuned", second))
        ]
        assert results_table(results, paired_differences(results[0], results[1])).endswith(
            "not compared: other rows or tokens"
        )


def test_mean_of_no_rows_is_nan() -> None:
    metric = Metric.mean("loss", [], higher_is_better=False)
    assert math.isnan(metric.value) and not metric.is_binary
    assert json.loads(json.dumps(metric.to_dict(), allow_nan=False)) == {"value": None, "values": []}
    assert compare_metric("rows", metric, metric) is None
    assert math.isnan(ModelResult("base", (TaskResult("rows", ()),)).loss)


def test_results_table() -> None:
    correct_metric, wrong = [1.0] * 30 + [0.0] * 10, [0.0] * 40
    before = ModelResult("base", (TaskResult("sums", (Metric.mean("acc", wrong), Metric("word_perplexity", 12345.6))),))
    after = ModelResult(
        "tuned", (TaskResult("sums", (Metric.mean("acc", correct_metric), Metric("word_perplexity", 9.87))),)
    )
    head, acc, second = results_table([before, after], paired_differences(before, after)).splitlines()
    assert head.split() == ["base", "tuned", "change"]
    assert acc.split()[:4] == ["sums", "acc", "0.0%", "(0"]
    assert "75.0% (30 of 40)" in acc
    assert "+75.0 [+" in acc
    assert acc.endswith("30 won, 0 lost: better")
    assert second.split() == ["word_perplexity", "1.235e+04", "9.8700"]
    assert "better" not in results_table([after], [])
