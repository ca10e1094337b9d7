"""Markdown tables, of answers of the model for experiment trackers and of facts for model cards."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, Any]]  # with the same keys


def to_table(rows: Rows) -> tuple[list[str], list[list[str]]]:
    """Columns and cells as text."""
    columns = list(rows[0]) if rows else []
    return columns, [["" if row[name] is None else str(row[name]) for name in columns] for row in rows]


def to_markdown(rows: Rows) -> str:
    """A Markdown table. Cells are code, which is shown as it is."""
    columns, cells = to_table(rows)
    return format_table(columns, [[code_span(cell.replace("\n", "↵")) for cell in row] for row in cells])


def code_span(text: str) -> str:
    """Markdown code span of any text: its fence is longer than all backticks in the text. Empty for an empty text."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}" if text else ""


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table. Line breaks in cells become spaces."""
    lines = [
        [cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in (header, ["---"] * len(header), *rows)
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)
