"""Progress of a run as text, from the files of its directory: lines, or a screen with small curves."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from tqdm import tqdm

from tunekit.checkpoint.run_dir import METRICS
from tunekit.config.secrets import escape_control
from tunekit.report.curves import Curve, find_unit, is_number, read_curves
from tunekit.report.facts import describe_state
from tunekit.report.run_files import RunFiles, is_running, read_run
from tunekit.system import format_bytes

POLL_SECONDS = 1.0
EARLIER_LINES = 5  # that are printed of a run which has begun before
MEAN_STEPS = 20  # of the time that is left
BARS = "▁▂▃▄▅▆▇█"
MAX_NAME, VALUE_WIDTH, MAX_BARS = 36, 10, 60  # characters
# Metrics of a line, and the first ones of a screen
MAIN_METRICS = ("reward", "loss", "grad_norm", "lr", "target_tokens_per_second", "tokens_per_second", "step_time")
LINE_METRICS = {"reward": "reward", "loss": "loss", "lr": "lr", "grad_norm": "grad_norm", "tokens_per_second": "tok/s"}
UNSHOWN = {"num_tokens", "num_target_tokens", "memory_allocated"}  # on a screen


@dataclass(frozen=True)
class ScreenSize:
    """Columns and rows of a terminal."""

    columns: int
    rows: int


def watch_lines(directory: Path, out: TextIO) -> None:
    """Print a line for each metric line until the run ends, and its state at the end."""
    num_printed: int | None = None
    for run in poll_run(directory):
        first = max(0, len(run.lines) - EARLIER_LINES) if num_printed is None else min(num_printed, len(run.lines))
        for line in run.lines[first:]:
            print(format_line(line, run), file=out, flush=True)
        num_printed = len(run.lines)
        if not run.is_running:
            print(f"{run.directory}: {describe_state(run)}", file=out, flush=True)


def poll_run(directory: Path) -> Iterator[RunFiles]:
    """The run now, after each change of its metrics, and at its end."""
    file, seen = directory / METRICS, None
    while True:
        running = is_running(directory)  # before the files are read: of a run that has ended, all lines are read
        stamp = (file.stat().st_size, file.stat().st_mtime_ns) if file.is_file() else None
        if seen is None or stamp != seen or not running:
            yield replace(read_run(directory), is_running=running)
        if not running:
            return
        seen = stamp
        time.sleep(POLL_SECONDS)


def format_line(line: Mapping[str, Any], run: RunFiles) -> str:
    """A metric line: the main metrics of a training step, or all values of an evaluation."""
    if "loss" not in line:
        values = [f"{name} {format_value(name, value)}" for name, value in line.items() if name != "step"]
        return escape_control(f"step {line['step']}: {', '.join(values)}")
    names = [name for name in LINE_METRICS if name in line]
    values = [f"{LINE_METRICS[name]} {format_value(name, line[name])}" for name in names]
    left = format_time_left(run, line["step"])
    return escape_control(f"step {line['step']}/{run.num_steps or '?'}: {', '.join(filter(None, [*values, left]))}")


def format_value(name: str, value: object) -> str:
    if not is_number(value):
        return "not finite" if value is None else str(value)
    number = float(str(value))
    return format_bytes(number) if find_unit(name) == "B" else f"{number:.4g}"


def format_time_left(run: RunFiles, step: int) -> str:
    """Time of the steps that are left, by the last ones; empty if it is unknown."""
    times = [line["step_time"] for line in run.lines if is_number(line.get("step_time"))][-MEAN_STEPS:]
    if not times or not run.num_steps or run.num_steps < step:
        return ""
    return f"{tqdm.format_interval(sum(times) / len(times) * (run.num_steps - step))} left"


def format_screen(run: RunFiles, size: ScreenSize) -> list[str]:
    """Lines of a screen: the run, a progress bar, and each metric with its last value and its curve."""
    lines = [f"{run.name}: {run.recipe} of {run.config.get('model', '')}", format_progress(run, size.columns), ""]
    curves = sorted(read_curves(run.lines, 0), key=metric_order)
    for curve in curves:
        if curve.metric not in UNSHOWN and len(lines) < size.rows - 1:
            lines.append(format_curve(curve, size.columns))
    return [escape_control(line)[: size.columns] for line in lines]


def metric_order(curve: Curve) -> int:
    """Main metrics first, then those of evaluations, then all others."""
    if curve.metric in MAIN_METRICS:
        return MAIN_METRICS.index(curve.metric)
    return len(MAIN_METRICS) + (not curve.metric.startswith("eval/"))


def format_progress(run: RunFiles, columns: int) -> str:
    text = " ".join(filter(None, (describe_state(run), format_time_left(run, run.last_step) if run.is_running else "")))
    width = min(30, columns - len(text) - 3)
    if not run.num_steps or width < 5:
        return text
    done = min(width, width * run.last_step // run.num_steps)
    return f"[{'#' * done}{'-' * (width - done)}] {text}"


def format_curve(curve: Curve, columns: int) -> str:
    value = format_value(curve.metric, curve.values[-1])
    width = min(MAX_NAME, columns // 3)
    bars = draw_bars(curve, min(MAX_BARS, columns - width - VALUE_WIDTH - 3))
    return f"{curve.metric[:width]:{width}} {value:>{VALUE_WIDTH}}  {bars}"


def draw_bars(curve: Curve, width: int) -> str:
    """A curve as a row of bars. Each is the mean of its steps; a space has no finite value."""
    values = np.array([np.nan if value is None else value for value in curve.values], float)
    parts = np.array_split(values, min(width, len(values))) if width > 0 else []
    means = [part[np.isfinite(part)].mean() if np.isfinite(part).any() else np.nan for part in parts]
    finite = [mean for mean in means if np.isfinite(mean)]
    if not finite:
        return ""
    lowest, spread = min(finite), (max(finite) - min(finite)) or 1.0
    levels = [round((mean - lowest) / spread * (len(BARS) - 1)) if np.isfinite(mean) else -1 for mean in means]
    return "".join(BARS[level] if level >= 0 else " " for level in levels)
