"""What rows are, by their columns: one table, of which the first line that fits is taken."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tunekit.data.chat_template.json_values import json_type
from tunekit.data.chat_template.messages import parse_json_cell
from tunekit.errors import UserError

SPEAKER_KEYS = {"role", "from"}  # who speaks, in the two ways to write messages
MESSAGE_COLUMNS = ("messages", "conversations", "conversation")


class RowFormat(NamedTuple):
    """A kind of rows, its keys that name columns with their names, and what is said of it."""

    kind: str
    columns: tuple[tuple[str, str], ...]
    description: str


class FormatRule(NamedTuple):
    """A line of the table: the columns that a row must have, and the types of their values."""

    row_format: RowFormat
    types: Mapping[str, type | tuple[type, ...]]


def format_rule(
    kind: str, says: str, types: Mapping[str, type | tuple[type, ...]], key: str | None = None
) -> FormatRule:
    """`key`: the one of the kind's keys that names the column."""
    names = ", ".join(map(repr, types))
    columns = () if key is None else tuple((key, name) for name in types)
    return FormatRule(RowFormat(kind, columns, f"{says} (column{'s' if len(types) > 1 else ''} {names})"), types)


TEXT_TYPES = (str, list)
CHAT = {
    name: format_rule("chat", "OpenAI messages", {name: list}, "messages_column").row_format for name in MESSAGE_COLUMNS
}
SHAREGPT = {
    name: format_rule("sharegpt", "ShareGPT", {name: list}, "conversations_column").row_format
    for name in MESSAGE_COLUMNS
}
RULES = (
    format_rule("preference", "preference pairs", {"chosen": TEXT_TYPES, "rejected": TEXT_TYPES}),
    format_rule(
        "unpaired_preference", "completions with marks", {"prompt": TEXT_TYPES, "completion": TEXT_TYPES, "label": bool}
    ),
    format_rule("completion", "prompts with completions", {"prompt": TEXT_TYPES, "completion": TEXT_TYPES}),
    format_rule("instruct", "Alpaca", {"instruction": str, "output": str}),
    format_rule("text", "plain text", {"text": str}),
)
LABEL_TYPES = (bool, int, float, str)
# What answers are compared in: a label that is no mark is told as what it is.
PREFERENCE_RULES = (
    RULES[0],
    format_rule("unpaired_preference", "completions with marks", {**RULES[1].types, "label": LABEL_TYPES}),
)
# What models that score learn from. Others read some of these rows too, without their labels.
REWARD_RULES = (
    RULES[0],
    format_rule("stepwise", "steps with labels", {"prompt": TEXT_TYPES, "completions": list, "labels": list}),
    format_rule("labeled", "conversations with labels", {"messages": list, "label": LABEL_TYPES}),
    format_rule("labeled", "texts with labels", {"text": str, "label": LABEL_TYPES}),
)


def detect_format(fields: Mapping[str, Any], before: Sequence[FormatRule] = ()) -> RowFormat:
    """What a row is, by lines that are asked before those of the table. UserError if none fits."""
    if asked := match_rule(fields, before):
        return asked
    for name in MESSAGE_COLUMNS:
        if name in fields and isinstance(found := parse_json_cell(fields[name], SPEAKER_KEYS), list):
            first = found[0] if found else None
            sharegpt = isinstance(first, dict) and first.get("role") is None and first.get("from") is not None
            return (SHAREGPT if sharegpt else CHAT)[name]
    if form := match_rule(fields, RULES):
        return form
    have = ", ".join(f"{name} ({json_type(value)})" for name, value in fields.items() if value is not None) or "none"
    raise UserError(
        f"no format is known by its columns, which are {have}; name one as `kind`, or rename columns by `transforms`"
    )


def match_rule(fields: Mapping[str, Any], lines: Sequence[FormatRule]) -> RowFormat | None:
    """The first line whose columns a row has."""
    for form, types in lines:
        if all(name in fields and isinstance(fields[name], wanted) for name, wanted in types.items()):
            return form
    return None
