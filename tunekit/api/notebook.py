"""Live progress of a run in a notebook: a line and a figure that change. Needs no widgets."""

import sys
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from tqdm import tqdm

from tunekit.loggers.observers import OpenObserver

SECONDS = 2.0  # between two figures
KERNEL_SHELL = "ZMQInteractiveShell"  # of IPython in notebooks, and base class of that of Colab


def has_notebook() -> bool:
    """Whether this code runs in the kernel of a notebook, which shows figures."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return any(cls.__name__ == KERNEL_SHELL for cls in type(shell).__mro__)


def open_display() -> list[OpenObserver]:
    """The display of a notebook; nothing elsewhere."""
    return [NotebookDisplay] if has_notebook() else []


class NotebookDisplay:
    """Shows the progress and the curves of a run below a cell."""

    def __init__(self, start: int, num_steps: int) -> None:
        self.num_steps, self.step, self.lines = num_steps, start, list[dict[str, Any]]()
        self.tools = import_module("IPython.display")
        self.plots = import_module("tunekit.publishing.plots")
        self.begin_time, self.start, self.last_drawn = time.monotonic(), start, 0.0
        self.text = self.tools.display(self.tools.Pretty(f"step {start}/{num_steps}"), display_id=True)
        self.picture: Any = None  # from the first metric line on

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step < self.step:  # the run has rolled back
            self.lines = [line for line in self.lines if line["step"] <= step]
        self.step = step
        self.lines.append({"step": step, **values})
        if time.monotonic() - self.last_drawn >= SECONDS:
            self.draw()

    def draw(self) -> None:
        """Show the current state."""
        self.text.update(self.tools.Pretty(self.progress))
        picture = self.tools.Image(self.plots.make_figure(self.lines)._repr_png_())
        if self.picture is None:
            self.picture = self.tools.display(picture, display_id=True)
        else:
            self.picture.update(picture)
        self.last_drawn = time.monotonic()

    @property
    def progress(self) -> str:
        """Step, loss, throughput and remaining time."""
        last = next((line for line in reversed(self.lines) if "tokens_per_second" in line), None)
        if last is None:
            return f"step {self.step}/{self.num_steps}"
        done = max(1, self.step - self.start)
        left = (time.monotonic() - self.begin_time) / done * (self.num_steps - self.step)
        names = [name for name in ("reward", "loss") if last.get(name) is not None]
        metrics = ", ".join(f"{name} {last[name]:.4f}" for name in names)
        speed = tqdm.format_sizeof(last["target_tokens_per_second"], divisor=1000)
        return f"step {self.step}/{self.num_steps}: {metrics}, {speed} target tok/s, {tqdm.format_interval(left)} left"

    def close(self) -> None:
        if self.lines:
            self.draw()
