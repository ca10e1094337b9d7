"""Values of the columns of a row: answers and numbers."""

import math
from typing import Any

from tunekit.data.chat_template.messages import get_column, json_type, parse_json_cell
from tunekit.data.transforms import Fields
from tunekit.errors import UserError

# Without a key path: a dataset config does not know its own, nor its index in a mixture.
SKIP_HINT = "Fix the row, or set `on_bad_row: skip` next to the `source` of this file"


def get_answer(fields: Fields, name: str, option: str) -> Any:
    """Chosen or rejected answer of a row. Raise UserError if it is null or an empty list."""
    answer = parse_json_cell(get_column(fields, name, option))
    if answer is None or answer == []:
        raise UserError(f"{name}: must be an answer, got {'null' if answer is None else 'an empty list'}. {SKIP_HINT}")
    return answer


def to_number(value: Any, name: str) -> float:
    """Number of a column; true is 1 and false is 0. Raise UserError for other types, NaN, and Inf."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        received = repr(value) if isinstance(value, float) else json_type(value)
        raise UserError(f"{name}: must be a number, got {received}")
    return float(value)
