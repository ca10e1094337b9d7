"""Answers of the model as a table, for experiment trackers."""

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
    lines = [columns, ["---"] * len(columns), *([to_code(cell) for cell in row] for row in cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def to_code(text: str) -> str:
    """Text as inline code in a cell of a table."""
    fence = "`" * (text.count("`") + 1)  # longer than any run of backticks in the text
    return f"{fence} {text} {fence}".replace("\n", "↵").replace("|", "\\|") if text else ""
