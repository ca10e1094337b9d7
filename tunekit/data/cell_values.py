"""Values of the columns of a row: answers and numbers."""

from typing import Any

import numpy as np

from tunekit.data.chat_template.messages import get_column, parse_json_cell
from tunekit.data.column_roles import Columns
from tunekit.data.readers.row_reader import json_type
from tunekit.data.transforms import Fields
from tunekit.errors import UserError

MAX_NUMBER = float(np.finfo(np.float32).max)  # of a column: values are stored in fp32
# Without a key path: a dataset config does not know its own, nor its index in a mixture.
SKIP_HINT = "Fix the row, or set `on_bad_row: skip` next to the `source` of this file"


def get_answer(fields: Fields, columns: Columns, role: str) -> Any:
    """Chosen or rejected answer of a row. Raise UserError if it is null or an empty list."""
    answer = parse_json_cell(get_column(fields, columns, role))
    if answer is None or answer == []:
        problem = f"must be an answer, got {'null' if answer is None else 'an empty list'}"
        raise UserError(f"{columns[role]}: {problem}. {SKIP_HINT}")
    return answer


def to_number(value: Any, name: str) -> float:
    """Number of a column; true is 1 and false is 0. Raise UserError for other types, NaN, and what fp32 cannot hold."""
    if not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
        received = repr(value) if isinstance(value, float) else json_type(value)
        problem = "a number in the range of fp32" if isinstance(value, int | float) else "a number"
        raise UserError(f"{name}: must be {problem}, got {received}")
    return float(value)
