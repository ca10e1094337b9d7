"""Progress of work on many items: a bar in a terminal; otherwise a line every 10 seconds."""

import sys
import time

from tqdm import tqdm

PRINT_INTERVAL = 10.0  # seconds between two lines


class ProgressLogger:
    """Counts finished items. Only the main process shows anything.

    Without a terminal, prints nothing in the first 10 seconds.
    """

    def __init__(self, description: str, total: int, unit: str, is_main: bool) -> None:
        self.description, self.total, self.unit, self.count = description, total, unit, 0
        self.bar = tqdm(total=total, desc=description, unit=unit, disable=None if is_main else True, leave=False)
        self.prints_lines = is_main and not sys.stderr.isatty()
        self.start_time = self.last_print = time.monotonic()

    def __enter__(self) -> "ProgressLogger":
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def update(self, count: int = 1) -> None:
        """Add finished items."""
        self.count += count
        self.bar.update(count)
        now = time.monotonic()
        if self.prints_lines and now - self.last_print >= PRINT_INTERVAL:
            self.last_print = now
            seconds_left = (now - self.start_time) / self.count * (self.total - self.count)
            text = f"{self.description}: {self.count:,} of {self.total:,} {self.unit}s"
            print(f"{text}, {tqdm.format_interval(seconds_left)} left", file=sys.stderr, flush=True)
