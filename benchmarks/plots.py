"""Plots of results: bars by contestant, lines over tokens. Requires matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot  # the backend must be set first

MAX_COLUMNS = 4  # of panels
COLORS = ("#1f5fbf", "#e08a1e", "#5a9e4b", "#999999", "#b0413e")


def bars(file: Path, panels: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    """A panel per quantity, a group per task, a bar per contestant: quantity, task, contestant."""
    figure, axes = pyplot.subplots(1, len(panels), figsize=(5.5 * len(panels), 4), squeeze=False)
    for axis, (quantity, works) in zip(axes[0], panels.items(), strict=True):
        names = list(dict.fromkeys(name for values in works.values() for name in values))
        width = 0.8 / max(len(names), 1)
        for i, name in enumerate(names):
            places = [
                x + (i - (len(names) - 1) / 2) * width for x, values in enumerate(works.values()) if name in values
            ]
            heights = [values[name] for values in works.values() if name in values]
            drawn = axis.bar(places, heights, width * 0.92, label=name, color=COLORS[i % len(COLORS)])
            axis.bar_label(drawn, fmt="{:.3g}", fontsize=8)
        axis.set_xticks(range(len(works)), works, fontsize=8)
        axis.set_title(quantity, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def line(file: Path, tokens: Sequence[float], panels: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """A panel per quantity over tokens, both axes logarithmic: quantity, name, values."""
    figure, axes = pyplot.subplots(1, len(panels), figsize=(5.5 * len(panels), 4), squeeze=False)
    for axis, (quantity, lines) in zip(axes[0], panels.items(), strict=True):
        for i, (name, values) in enumerate(lines.items()):
            axis.plot(tokens, values, marker="o" if i == 0 else None, color=COLORS[i % len(COLORS)], label=name)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_xticks(tokens, [f"{t:,}" for t in tokens], fontsize=8)
        axis.set_xlabel("tokens a step")
        axis.set_title(quantity, fontsize=10)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def steps(file: Path, rungs: Mapping[str, tuple[float, float]]) -> None:
    """Speed and memory by rung: tokens per second and GiB by name."""
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 0.45 * len(rungs) + 1.2), sharey=True)
    titles = ("target tokens per second", "peak resident memory, GiB")
    for axis, title, values in zip(axes, titles, zip(*rungs.values(), strict=True), strict=True):
        drawn = axis.barh(list(rungs), values, color=COLORS[0] if axis is axes[0] else COLORS[1])
        axis.bar_label(drawn, fmt="{:.3g}", fontsize=8, padding=2)
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def rewards(file: Path, runs: Mapping[str, tuple[Sequence[tuple[int, float]], Sequence[tuple[int, float]]]]) -> None:
    """A panel per run: rewards by step in training (line) and on held-out rows (points)."""
    num_rows = -(-len(runs) // MAX_COLUMNS)
    num_columns = -(-len(runs) // num_rows)
    size = 3.6 * num_columns, 3.2 * num_rows
    figure, axes = pyplot.subplots(num_rows, num_columns, figsize=size, squeeze=False, sharey=True)
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
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
