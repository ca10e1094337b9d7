"""Numbers that reward functions and environments of the user return."""

import math
from collections.abc import Mapping
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tunekit.errors import CaughtError, UserError, describe_exception

MAX_SCORE = torch.finfo(torch.float32).max  # scores are fp32


def to_number(value: Any, where: str) -> float:
    """A score as a number; NaN for None. Raises UserError, which starts with `where`, for other values."""
    with CaughtError() as caught:  # the methods of a class of the user may raise anything
        number = as_float(value)
        if number is not None and (math.isnan(number) or abs(number) <= MAX_SCORE):
            return number
    received = repr(value)[:50] if type(value) in (str, float, complex) else type(value).__name__
    reason = "" if caught.error is None else f" ({describe_exception(caught.error)})"
    raise UserError(
        f"{where}: expected a finite number in the range of fp32, got {received}{reason}. Return a number or None."
    )


def as_float(value: Any) -> float | None:
    """A real number as float; NaN for None, and None for anything else. A tensor or array may have one element."""
    if value is None:
        return math.nan
    if isinstance(value, Tensor | np.ndarray | np.generic):
        value = value.item()
    return float(value) if isinstance(value, Real | Decimal) else None


def to_metrics(values: Any, where: str) -> dict[str, float]:
    """Numbers by name, without those that are None or NaN. Raises UserError, as `to_number` does, for other values."""
    if not isinstance(values, Mapping):
        raise UserError(f"{where}: expected a dict of numbers, got {type(values).__name__}. Return a dict.")
    numbers = {str(name): to_number(value, f"{where}: {name!r}") for name, value in values.items()}
    return {name: number for name, number in numbers.items() if not math.isnan(number)}
