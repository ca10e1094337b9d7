"""What rows are, by their columns: one table, of which the first line that fits is taken."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tunekit.data.chat_template.json_values import json_type
from tunekit.data.chat_template.messages import parse_json_cell
from tunekit.errors import UserError

SPEAKER = {"role", "from"}  # who speaks, in the two ways to write messages
TURNS = ("messages", "conversations", "conversation")


class RowFormat(NamedTuple):
    """A kind of rows, its keys that name columns with their names, and what is said of it."""

    kind: str
    columns: tuple[tuple[str, str], ...]
    says: str


class FormatRule(NamedTuple):
    """A line of the table: the columns that a row must have, and the types of their values."""

    form: RowFormat
    types: Mapping[str, type | tuple[type, ...]]


def line(kind: str, says: str, types: Mapping[str, type | tuple[type, ...]], key: str | None = None) -> FormatRule:
    """`key`: the one of the kind's keys that names the column."""
    names = ", ".join(map(repr, types))
    columns = () if key is None else tuple((key, name) for name in types)
    return FormatRule(RowFormat(kind, columns, f"{says} (column{'s' if len(types) > 1 else ''} {names})"), types)


TEXTS = (str, list)
CHAT = {name: line("chat", "OpenAI messages", {name: list}, "messages_column").form for name in TURNS}
SHAREGPT = {name: line("sharegpt", "ShareGPT", {name: list}, "conversations_column").form for name in TURNS}
TABLE = (
    line("preference", "preference pairs", {"chosen": TEXTS, "rejected": TEXTS}),
    line("unpaired_preference", "completions with marks", {"prompt": TEXTS, "completion": TEXTS, "label": bool}),
    line("completion", "prompts with completions", {"prompt": TEXTS, "completion": TEXTS}),
    line("instruct", "Alpaca", {"instruction": str, "output": str}),
    line("text", "plain text", {"text": str}),
)
NUMBERED = (bool, int, float, str)
# What answers are compared in: a label that is no mark is told as what it is.
COMPARED = (TABLE[0], line("unpaired_preference", "completions with marks", {**TABLE[1].types, "label": NUMBERED}))
# What models that score learn from. Others read some of these rows too, without their labels.
SCORED = (
    TABLE[0],
    line("stepwise", "steps with labels", {"prompt": TEXTS, "completions": list, "labels": list}),
    line("labeled", "conversations with labels", {"messages": list, "label": NUMBERED}),
    line("labeled", "texts with labels", {"text": str, "label": NUMBERED}),
)


def detect_format(fields: Mapping[str, Any], before: Sequence[FormatRule] = ()) -> RowFormat:
    """What a row is, by lines that are asked before those of the table. UserError if none fits."""
    if asked := fitting(fields, before):
        return asked
    for name in TURNS:
        if name in fields and isinstance(found := parse_json_cell(fields[name], SPEAKER), list):
            first = found[0] if found else None
            sharegpt = isinstance(first, dict) and first.get("role") is None and first.get("from") is not None
            return (SHAREGPT if sharegpt else CHAT)[name]
    if form := fitting(fields, TABLE):
        return form
    have = ", ".join(f"{name} ({json_type(value)})" for name, value in fields.items() if value is not None) or "none"
    raise UserError(
        f"no format is known by its columns, which are {have}; name one as `kind`, or rename columns by `transforms`"
    )


def fitting(fields: Mapping[str, Any], lines: Sequence[FormatRule]) -> RowFormat | None:
    """The first line whose columns a row has."""
    for form, types in lines:
        if all(name in fields and isinstance(fields[name], wanted) for name, wanted in types.items()):
            return form
    return None
