"""Whether two models differ: the tests of the books, and noise that is not taken for a change."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from tunekit.evaluation.results import Metric, ModelResult, TaskResult
from tunekit.evaluation.significance import bootstrap_interval, compare_metric, mcnemar, paired_differences
from tunekit.evaluation.table import results_table


@pytest.mark.parametrize(("won", "lost"), [(0, 0), (3, 0), (1, 9), (12, 7), (40, 40), (500, 430)])
def test_the_chance_is_that_of_a_binomial_test(won: int, lost: int) -> None:
    wanted = stats.binomtest(won, won + lost).pvalue if won + lost else 1.0
    assert mcnemar(won, lost) == pytest.approx(wanted, rel=1e-6)


def test_bounds_of_means_are_those_of_a_paired_t_test() -> None:
    draw = np.random.default_rng(0)
    one = draw.normal(size=400)
    other = one + draw.normal(0.1, 0.5, size=400)
    low, high = bootstrap_interval(Metric.mean("loss", [*one]), Metric.mean("loss", [*other]), seed=1)
    wanted = stats.ttest_rel(other, one).confidence_interval(0.95)
    assert (low, high) == pytest.approx((wanted.low, wanted.high), abs=0.01)
    assert bootstrap_interval(Metric.mean("loss", [*one]), Metric.mean("loss", [*other]), seed=1) == (low, high)


def test_rows_weigh_as_their_tokens_do() -> None:
    """As many rows of ten tokens that lose a nat each as of one token that win ten."""
    tokens = [10.0, 1.0] * 50
    before = Metric.mean("loss", tokens, tokens, higher=False)
    after = Metric.mean("loss", [count + (1 if count > 1 else -10) for count in tokens], tokens, higher=False)
    change = compare_metric("rows", before, after)
    assert change is not None
    assert change.difference == pytest.approx(-9 * 50 / (11 * 50))
    assert change.better is True
    assert change.low < change.difference < change.high < 0


def test_noise_is_rarely_a_change() -> None:
    draw, clear = np.random.default_rng(0), 0
    for _ in range(40):
        one, other = ((draw.random(50) < 0.6).astype(float).tolist() for _ in range(2))
        change = compare_metric("rows", Metric.mean("acc", one), Metric.mean("acc", other))
        assert change is not None
        assert change.won == tuple(i for i in range(50) if other[i] > one[i])
        assert change.lost == tuple(i for i in range(50) if other[i] < one[i])
        clear += change.better is not None
    assert clear <= 4


def test_what_does_not_come_of_the_same_rows_is_not_compare_metric() -> None:
    three, four = Metric.mean("acc", [1.0, 0.0, 1.0]), Metric.mean("acc", [1.0, 0.0, 1.0, 1.0])
    assert compare_metric("rows", three, four) is None
    assert compare_metric("rows", Metric("word_perplexity", 9.0), Metric("word_perplexity", 8.0)) is None
    one, other = (Metric.mean("loss", [1.0], [tokens]) for tokens in (3.0, 4.0))
    assert compare_metric("rows", one, other) is None
    results = [
        ModelResult(name, (TaskResult("rows", (figure,)),)) for name, figure in (("base", one), ("tuned", other))
    ]
    assert results_table(results, []).endswith("not compared: other rows or tokens")


def test_rows_are_compared_by_what_they_are() -> None:
    """As many rows of another file, or some of them in another order, are others."""
    values = [1.0, 0.0, 1.0]

    def figure(*rows: str) -> Metric:
        return Metric.mean("acc", values, rows=rows)

    one = figure("a.jsonl:1", "a.jsonl:2", "a.jsonl:3")
    assert compare_metric("rows", one, figure("a.jsonl:1", "a.jsonl:2", "a.jsonl:3")) is not None
    for other in (figure("b.jsonl:1", "b.jsonl:2", "b.jsonl:3"), figure("a.jsonl:1", "a.jsonl:3", "a.jsonl:2")):
        assert compare_metric("rows", one, other) is None
        results = [
            ModelResult(name, (TaskResult("rows", (some,)),)) for name, some in (("base", one), ("tuned", other))
        ]
        assert results_table(results, paired_differences(results[0], results[1])).endswith(
            "not compared: other rows or tokens"
        )


def test_a_mean_of_no_row_is_no_number() -> None:
    figure = Metric.mean("loss", [], higher=False)
    assert math.isnan(figure.value) and not figure.is_binary
    assert json.loads(json.dumps(figure.to_dict(), allow_nan=False)) == {"value": None, "values": []}
    assert compare_metric("rows", figure, figure) is None
    assert math.isnan(ModelResult("base", (TaskResult("rows", ()),)).loss)


def test_one_table_tells_all() -> None:
    right, wrong = [1.0] * 30 + [0.0] * 10, [0.0] * 40
    before = ModelResult("base", (TaskResult("sums", (Metric.mean("acc", wrong), Metric("word_perplexity", 12345.6))),))
    after = ModelResult("tuned", (TaskResult("sums", (Metric.mean("acc", right), Metric("word_perplexity", 9.87))),))
    head, acc, other = results_table([before, after], paired_differences(before, after)).splitlines()
    assert head.split() == ["base", "tuned", "change"]
    assert acc.split()[:4] == ["sums", "acc", "0.0%", "(0"]
    assert "75.0% (30 of 40)" in acc
    assert "+75.0 [+" in acc
    assert acc.endswith("30 won, 0 lost: better")
    assert other.split() == ["word_perplexity", "1.235e+04", "9.8700"]
    assert "better" not in results_table([after], [])
