"""Plots of runs of any length, with missing and non-finite values."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tunekit.publishing import plots

STEP = {"loss": 2.0, "lr": 1e-4, "grad_norm": 1.0}
LONG = [{"step": i, "loss": 3 - i / 400, "lr": 1e-4, "grad_norm": 1.0} for i in range(1, 1000)]


@pytest.mark.parametrize("lines", [
    [],
    [{"step": 1} | STEP],
    [{"step": 0, "eval/loss": None}, {"step": 1, "loss": None, "lr": 0.0, "grad_norm": None}],
    [
        {"step": 0, "eval/loss": 5.0},
        *LONG,
        {"step": 999, "eval/loss": 0.01},
        {"step": 999, "verify/mean_logit_diff": 0.0},
    ],
], ids=["none", "one", "not finite", "long"])  # fmt: skip
def test_any_metrics_can_be_plotted(lines: list[dict[str, Any]], tmp_path: Path) -> None:
    plots.plot_metrics(lines, tmp_path / "curves.png")
    with Image.open(tmp_path / "curves.png") as image:
        assert image.size == (1080, 720)
        orange = np.array([int(plots.ORANGE[i : i + 2], 16) for i in (1, 3, 5)])
        has_orange = (np.asarray(image.convert("RGB")) == orange).all(-1).any()
    assert has_orange == any("eval/loss" in line for line in lines), "the evaluation loss has its own color"


def test_missing_values_are_gaps() -> None:
    lines = [{"step": 2, "loss": 1.0}, {"step": 2, "eval/loss": 9.0}, {"step": 4, "loss": None}]
    steps, values = plots.metric_series(lines, "loss")
    np.testing.assert_equal(steps, [2, 4])
    np.testing.assert_equal(values, [1.0, np.nan])


def test_smoothed_curve_is_the_mean_of_adjacent_values() -> None:
    values = np.random.default_rng(0).normal(size=150)
    values[70:75] = np.nan
    expected = [np.nanmean(values[max(0, i - 1) : i + 2]) for i in range(150) if not 70 < i < 74]
    actual = plots.smooth_values(values)
    np.testing.assert_allclose(np.delete(actual, [71, 72, 73]), expected)
    assert np.isnan(actual[71:74]).all()
