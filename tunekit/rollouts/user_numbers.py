"""Numbers that reward functions and environments of the user return."""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

from tunekit.errors import UserError


def to_number(value: Any, where: str) -> float:
    """A score as a number; NaN for None. Raises UserError, which starts with `where`, for other values."""
    if value is None:
        return math.nan
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, Real | np.bool_) or math.isinf(value):
        raise UserError(f"{where}: expected a finite number, got {str(value)[:50]!r}. Return a number or None.")
    return float(value)


def to_metrics(values: Any, where: str) -> dict[str, float]:
    """Numbers by name, without those that are None or NaN. Raises UserError, as `to_number` does, for other values."""
    if not isinstance(values, Mapping):
        raise UserError(f"{where}: expected a dict of numbers, got {type(values).__name__}. Return a dict.")
    numbers = {str(name): to_number(value, f"{where}: {name!r}") for name, value in values.items()}
    return {name: number for name, number in numbers.items() if not math.isnan(number)}
