"""Replacement of `tunekit.publishing.plots`, whose plots take 0.3 s and its import 0.6 s."""

import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

PLOTS = "tunekit.publishing.plots"


def plot_metrics(lines: Iterable[Mapping[str, Any]], file: Path) -> None:
    """Write the header of a PNG file instead of a plot."""
    assert all("step" in line for line in lines)
    file.write_bytes(b"\x89PNG\r\n\x1a\n")


def make_figure(lines: Iterable[Mapping[str, Any]]) -> object:
    """An empty figure instead of a plot."""
    assert all("step" in line for line in lines)
    return import_module("matplotlib.figure").Figure()


def replace_plots() -> None:
    """Let all runs of this process write these files."""
    sys.modules[PLOTS] = sys.modules[__name__]
