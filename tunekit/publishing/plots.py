"""The numbers of a run as a picture. A module of its own because matplotlib takes a second to import."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

BLUE, ORANGE, GREEN, RED, GREY = "#2f6fde", "#e8710a", "#188038", "#b3261e", "#5f6368"
FEW = 40  # points of a curve that is drawn as it is; longer ones get a smooth line over them
SPREAD = 30  # largest to smallest: beyond that, an axis counts in powers of ten
LOSS, RATE = "loss (nats per learnt token)", "learning rate"
Lines = Sequence[Mapping[str, Any]]


def plot_metrics(lines: Lines, file: Path) -> None:
    """Loss, learning rate and gradient norm over the steps of a run, from the lines of its metrics, as a PNG."""
    figure = Figure(figsize=(9, 6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplot_mosaic([["loss", "loss"], ["lr", "grad_norm"]], height_ratios=[3, 2])
    curve(panels["loss"], *series(lines, "loss"), BLUE, "training")
    held = series(lines, "eval/loss")
    if len(held[0]):
        panels["loss"].plot(*held, color=ORANGE, marker="o", markersize=4, linewidth=1.4, label="eval/loss")
        panels["loss"].legend(frameon=False, labelcolor=GREY)
    panels["lr"].plot(*series(lines, "lr"), color=GREEN, linewidth=1.6)  # a schedule has no noise
    curve(panels["grad_norm"], *series(lines, "grad_norm"), RED)
    titles = {"loss": LOSS, "lr": RATE, "grad_norm": "gradient norm"}
    for name, title in titles.items():
        dress(panels[name], title)
    figure.savefig(file, metadata={"Software": "tunekit"})


def series(lines: Lines, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a number; what was not finite is a gap."""
    found = [(line["step"], np.nan if line[name] is None else line[name]) for line in lines if name in line]
    steps, values = zip(*found, strict=True) if found else ((), ())
    return np.array(steps, float), np.array(values, float)


def curve(axes: Axes, steps: np.ndarray, values: np.ndarray, color: str, label: str | None = None) -> None:
    if len(steps) <= FEW:
        axes.plot(steps, values, color=color, linewidth=1.6, marker="." if len(steps) < 2 else "", label=label)
    else:
        axes.plot(steps, values, color=color, linewidth=0.7, alpha=0.35)
        axes.plot(steps, smooth(values), color=color, linewidth=1.6, label=label)


def smooth(values: np.ndarray) -> np.ndarray:
    """A running mean over a fiftieth of the curve; gaps count for nothing."""
    width = max(3, len(values) // 50)
    kernel, known = np.ones(width), np.isfinite(values)
    total = np.convolve(np.where(known, values, 0), kernel, "same")
    count = np.convolve(known.astype(float), kernel, "same")
    return np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)


def dress(axes: Axes, title: str) -> None:
    """Few lines, and an axis that suits what is drawn."""
    drawn = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.lines])
    drawn = drawn[np.isfinite(drawn)]
    if title != RATE and len(drawn) and 0 < SPREAD * drawn.min() < drawn.max():
        axes.set_yscale("log")
    elif title != LOSS and len(drawn) and drawn.min() >= 0:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(title, loc="left", fontsize=10, color=GREY)
    axes.set_xlabel("step", fontsize=9, color=GREY)
    axes.tick_params(which="both", colors=GREY, labelsize=9, length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#c4c7c5")
    axes.grid(axis="y", color="#e8eaed", linewidth=0.8)
    axes.set_axisbelow(True)
