"""Divergence of training: a loss that rises far above its first value and stays there, without NaN or Inf."""

from collections.abc import Sequence
from statistics import median

WINDOW = 8  # losses; one bad batch is not a divergence


def describe_divergence(first: float, later: Sequence[float]) -> str | None:
    """Message if the median of the last losses is above the first loss by more than 1 and by more than |first|."""
    last = median(later[-WINDOW:]) if later else first
    if not last > first + max(abs(first), 1.0):
        return None
    count = f"median of the last {min(len(later), WINDOW)} values"
    return f"training has diverged: the loss rose from {first:.4g} at the start to {last:.4g} ({count})"
