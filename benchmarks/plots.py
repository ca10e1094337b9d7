"""Plots of results. Requires matplotlib."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib import pyplot  # the backend must be set first
from matplotlib.axes import Axes

MAX_COLUMNS = 4  # of panels
COLORS = ("#1f5fbf", "#e08a1e", "#5a9e4b", "#999999", "#b0413e")


@contextmanager
def save_figure(
    file: Path, num_rows: int, num_columns: int, size: tuple[float, float], sharey: bool = False
) -> Iterator[np.ndarray]:
    """Axes (num_rows, num_columns) of a figure, which is written to `file` at the end of the block."""
    figure, axes = pyplot.subplots(num_rows, num_columns, figsize=size, squeeze=False, sharey=sharey)
    yield axes
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def hide_frame(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)


def plot_bars(file: Path, panels: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    """A panel per metric, a group of bars per task, a bar per library: metric, task, library."""
    with save_figure(file, 1, len(panels), (5.5 * len(panels), 4)) as axes:
        for axis, (metric, tasks) in zip(axes[0], panels.items(), strict=True):
            libraries = list(dict.fromkeys(name for values in tasks.values() for name in values))
            width = 0.8 / max(len(libraries), 1)
            for i, name in enumerate(libraries):
                offset = (i - (len(libraries) - 1) / 2) * width
                positions = [x + offset for x, values in enumerate(tasks.values()) if name in values]
                heights = [values[name] for values in tasks.values() if name in values]
                bars = axis.bar(positions, heights, width * 0.92, label=name, color=COLORS[i % len(COLORS)])
                axis.bar_label(bars, fmt="{:.3g}", fontsize=8)
            axis.set_xticks(range(len(tasks)), tasks, fontsize=8)
            axis.set_title(metric, fontsize=10)
            hide_frame(axis)
        axes[0][0].legend(frameon=False, fontsize=8)


def plot_scaling(file: Path, tokens: Sequence[float], title: str, lines: Mapping[str, Sequence[float]]) -> None:
    """Lines over the number of tokens, on logarithmic axes."""
    with save_figure(file, 1, 1, (5.5, 4)) as axes:
        axis = axes[0][0]
        for i, (name, values) in enumerate(lines.items()):
            axis.plot(tokens, values, marker="o" if i == 0 else None, color=COLORS[i % len(COLORS)], label=name)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_xticks(tokens, [f"{t:,}" for t in tokens], fontsize=8)
        axis.set_xlabel("tokens per step")
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8)


def plot_ablation(file: Path, results: Mapping[str, tuple[float, float]]) -> None:
    """Horizontal bars by optimization: target tokens per second and GiB."""
    with save_figure(file, 1, 2, (10, 0.45 * len(results) + 1.2), sharey=True) as axes:
        titles = ("target tokens per second", "peak resident memory, GiB")
        for i, (title, values) in enumerate(zip(titles, zip(*results.values(), strict=True), strict=True)):
            axis = axes[0][i]
            axis.bar_label(axis.barh(list(results), values, color=COLORS[i]), fmt="{:.3g}", fontsize=8, padding=2)
            axis.set_title(title, fontsize=10)
            hide_frame(axis)
        axes[0][0].invert_yaxis()


def plot_rewards(
    file: Path, runs: Mapping[str, tuple[Sequence[tuple[int, float]], Sequence[tuple[int, float]]]]
) -> None:
    """A panel per run: (step, reward) in training as a line, and on held-out rows as points."""
    num_rows = -(-len(runs) // MAX_COLUMNS)
    num_columns = -(-len(runs) // num_rows)
    with save_figure(file, num_rows, num_columns, (3.6 * num_columns, 3.2 * num_rows), sharey=True) as axes:
        for axis in axes.flat[len(runs) :]:
            axis.set_visible(False)
        for axis, (name, (training, held_out)) in zip(axes.flat, runs.items(), strict=False):
            axis.plot(*zip(*training, strict=True), color=COLORS[0], label="training")
            axis.plot(*zip(*held_out, strict=True), "o", color=COLORS[1], label="held-out")
            axis.set_xlabel("step")
            axis.set_ylim(-0.02, 1.02)
            axis.set_title(name, fontsize=10)
            axis.grid(alpha=0.3)
        for axis in axes[:, 0]:
            axis.set_ylabel("mean reward")
        axes[0][0].legend(frameon=False, fontsize=8)
