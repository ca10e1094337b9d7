"""Plots of the metrics of a run. A separate module, because matplotlib takes a second to import."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

BLUE, ORANGE, GREEN, RED, GRAY = "#2f6fde", "#e8710a", "#188038", "#b3261e", "#5f6368"
SMOOTHING_MIN_POINTS = 40  # curves with more points also get a smoothed line
LOG_SCALE_RATIO = 30  # ratio of largest to smallest value above which an axis is logarithmic
LOSS, LEARNING_RATE = "loss (nats per target token)", "learning rate"
METADATA = {"Software": "tunekit"}
Lines = Sequence[Mapping[str, Any]]


class MetricsFigure(Figure):
    """A figure that IPython shows, also without the inline backend of matplotlib."""

    def _repr_png_(self) -> bytes:
        """PNG file."""
        png = BytesIO()
        self.savefig(png, format="png", metadata=METADATA)
        return png.getvalue()


def plot_metrics(lines: Lines, file: Path) -> None:
    """Plot loss, learning rate and gradient norm over the steps of a run, and save a PNG."""
    make_figure(lines).savefig(file, metadata=METADATA)


def make_figure(lines: Lines) -> MetricsFigure:
    """Plot loss, learning rate and gradient norm over the steps of a run."""
    figure = MetricsFigure(figsize=(9, 6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplot_mosaic([["loss", "loss"], ["lr", "grad_norm"]], height_ratios=[3, 2])
    plot_curve(panels["loss"], *metric_series(lines, "loss"), BLUE, "training")
    eval_loss = metric_series(lines, "eval/loss")
    if len(eval_loss[0]):
        panels["loss"].plot(*eval_loss, color=ORANGE, marker="o", markersize=4, linewidth=1.4, label="eval/loss")
        panels["loss"].legend(frameon=False, labelcolor=GRAY)
    panels["lr"].plot(*metric_series(lines, "lr"), color=GREEN, linewidth=1.6)  # not noisy
    plot_curve(panels["grad_norm"], *metric_series(lines, "grad_norm"), RED)
    titles = {"loss": LOSS, "lr": LEARNING_RATE, "grad_norm": "gradient norm"}
    for name, title in titles.items():
        style_axes(panels[name], title)
    return figure


def metric_series(lines: Lines, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a metric. Non-finite values are NaN, a gap in the plot."""
    points = [(line["step"], np.nan if line[name] is None else line[name]) for line in lines if name in line]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return np.array(steps, float), np.array(values, float)


def plot_curve(axes: Axes, steps: np.ndarray, values: np.ndarray, color: str, label: str | None = None) -> None:
    if len(steps) <= SMOOTHING_MIN_POINTS:
        axes.plot(steps, values, color=color, linewidth=1.6, marker="." if len(steps) < 2 else "", label=label)
    else:
        axes.plot(steps, values, color=color, linewidth=0.7, alpha=0.35)
        axes.plot(steps, smooth_values(values), color=color, linewidth=1.6, label=label)


def smooth_values(values: np.ndarray) -> np.ndarray:
    """Running mean over 1/50 of the curve, ignoring NaN."""
    width = max(3, len(values) // 50)
    kernel, is_finite = np.ones(width), np.isfinite(values)
    total = np.convolve(np.where(is_finite, values, 0), kernel, "same")
    count = np.convolve(is_finite.astype(float), kernel, "same")
    return np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)


def style_axes(axes: Axes, title: str) -> None:
    """Set titles, colors and scales of a panel."""
    values = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.lines])
    values = values[np.isfinite(values)]
    if title != LEARNING_RATE and len(values) and 0 < LOG_SCALE_RATIO * values.min() < values.max():
        axes.set_yscale("log")
    elif title != LOSS and len(values) and values.min() >= 0:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(title, loc="left", fontsize=10, color=GRAY)
    axes.set_xlabel("step", fontsize=9, color=GRAY)
    axes.tick_params(which="both", colors=GRAY, labelsize=9, length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#c4c7c5")
    axes.grid(axis="y", color="#e8eaed", linewidth=0.8)
    axes.set_axisbelow(True)
