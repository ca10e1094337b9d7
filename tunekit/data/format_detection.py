"""Detect the format of a row from its columns: the first matching rule of a table wins."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tunekit.data.chat_template.messages import MissingColumnError, parse_json_cell
from tunekit.data.readers.row_reader import json_type
from tunekit.errors import UserError

SPEAKER_KEYS = {"role", "from"}  # key of the speaker in OpenAI messages, in ShareGPT
MESSAGE_COLUMNS = ("messages", "conversations", "conversation")


class RowFormat(NamedTuple):
    """Kind of a dataset, the columns of its roles that differ from their defaults, and a description."""

    kind: str
    columns: tuple[tuple[str, str | None], ...]
    description: str


class FormatRule(NamedTuple):
    """A format, the columns that a row must have, and the types of their values."""

    row_format: RowFormat
    types: Mapping[str, type | tuple[type, ...]]


def format_rule(
    kind: str, description: str, types: Mapping[str, type | tuple[type, ...]], role: str | None = None
) -> FormatRule:
    """Rule of a kind. `role` is that of the column, if it is not the default."""
    names = ", ".join(map(repr, types))
    columns = () if role is None else tuple((role, name) for name in types)
    label = f"{description} (column{'s' if len(types) > 1 else ''} {names})"
    return FormatRule(RowFormat(kind, columns, label), types)


TEXT_TYPES = (str, list)
ANSWER_TYPES = (str, list, dict)  # an object is one message
CHAT = {name: format_rule("chat", "OpenAI messages", {name: list}, "messages").row_format for name in MESSAGE_COLUMNS}
SHAREGPT = {
    name: format_rule("sharegpt", "ShareGPT", {name: list}, "conversations").row_format for name in MESSAGE_COLUMNS
}
INSTRUCT = format_rule("instruct", "Alpaca", {"instruction": str, "output": str})
PRETOKENIZED = format_rule("pretokenized", "token ids", {"input_ids": list})
RULES = (
    format_rule("preference", "preference pairs", {"chosen": ANSWER_TYPES, "rejected": ANSWER_TYPES}),
    format_rule(
        "unpaired_preference",
        "unpaired preferences",
        {"prompt": TEXT_TYPES, "completion": ANSWER_TYPES, "label": bool},
    ),
    format_rule("completion", "prompts with completions", {"prompt": TEXT_TYPES, "completion": ANSWER_TYPES}),
    INSTRUCT,
    format_rule("segments", "segments", {"segments": list}),
    format_rule("text", "plain text", {"text": str}),
)
LABEL_TYPES = (bool, int, float, str)
TYPE_LABELS: Mapping[type | tuple[type, ...], str] = {
    str: "a string",
    list: "a list",
    bool: "true or false",
    TEXT_TYPES: "a string or a list of messages",
    ANSWER_TYPES: "a string or a list of messages",
    LABEL_TYPES: "a number or a string",
}
# Rules of the preference recipe. Accepts any label, so that a wrong type is reported as such.
PREFERENCE_RULES = (
    RULES[0],
    format_rule("unpaired_preference", "unpaired preferences", {**RULES[1].types, "label": LABEL_TYPES}),
)
# Rules of the reward recipe. Other recipes read some of these rows as well, without their labels.
REWARD_RULES = (
    RULES[0],
    format_rule("stepwise", "steps with labels", {"prompt": TEXT_TYPES, "completions": list, "labels": list}),
    format_rule("labeled", "conversations with labels", {"messages": list, "label": LABEL_TYPES}),
    format_rule("labeled", "texts with labels", {"text": str, "label": LABEL_TYPES}),
    format_rule("reranking", "queries and documents", {"query": str, "document": str, "label": LABEL_TYPES}),
    format_rule("reranking_pairs", "triplets", {"query": str, "positive": TEXT_TYPES, "negative": TEXT_TYPES}),
)

# Column names of retrieval datasets, in the order of preference.
QUERIES, POSITIVES, NEGATIVES = ("query", "anchor", "question"), ("positive", "pos", "answer"), ("negative", "neg")
# Rules of recipe `embed`. Other columns, such as `negative`, may contain hard negatives.
EMBEDDING_RULES = (
    *(
        format_rule("retrieval", "queries with documents", {query: str, positive: TEXT_TYPES})
        for query in QUERIES
        for positive in POSITIVES
    ),
    format_rule("similarity", "pairs of texts", {"sentence1": str, "sentence2": str, "score": LABEL_TYPES}),
)
SUGGESTED_LOSSES = {"similarity": "cosent"}  # of kinds that the default loss of their recipe does not accept


def detect_format(fields: Mapping[str, Any], first_rules: Sequence[FormatRule] = ()) -> RowFormat:
    """Format of a row. `first_rules` are tried before all others. Raise UserError if no rule matches."""
    if row_format := match_rule(fields, (*first_rules, PRETOKENIZED)):
        return row_format
    for name in MESSAGE_COLUMNS:
        if name in fields and isinstance(messages := parse_json_cell(fields[name], SPEAKER_KEYS), list):
            return (SHAREGPT if is_sharegpt(messages) else CHAT)[name]
    if row_format := match_rule(fields, RULES):
        return row_format
    for row_format, types in (*first_rules, *RULES):
        if all(fields.get(name) is not None for name in types):
            name = next(name for name, expected in types.items() if not isinstance(fields[name], expected))
            problem = f"{name}: must be {TYPE_LABELS[types[name]]}, got {json_type(fields[name])}"
            raise UserError(f"{problem}. The row has the columns of {row_format.description}")
    columns = ", ".join(f"{name} ({json_type(value)})" for name, value in fields.items() if value is not None) or "none"
    raise UserError(f"unknown format with columns: {columns}. Set `kind`, or rename columns with `transforms`")


def is_sharegpt(messages: list[Any]) -> bool:
    """Whether the items of a conversation have `from` and `value` instead of `role` and `content`."""
    first = messages[0] if messages else None
    return isinstance(first, dict) and first.get("role") is None and first.get("from") is not None


def explain_missing_column(error: MissingColumnError, fields: Mapping[str, Any], kind: str) -> str:
    """Message about a row that lacks a column of its `kind`. Names the other kind whose columns it has."""
    row_format = detect_other_kind(fields, kind)
    if row_format is None or row_format.kind == kind:
        return str(error)
    loss = SUGGESTED_LOSSES.get(row_format.kind)
    keys = f"`kind: {row_format.kind}`" + ("" if loss is None else f" and `loss: {loss}`")
    return f"{str(error)[:-1]}, or {keys}: the row has the format of {row_format.description}."


def detect_other_kind(fields: Mapping[str, Any], kind: str) -> RowFormat | None:
    """Format of a row among those that are used for the same training as `kind`."""
    if any(rule.row_format.kind == kind for rule in EMBEDDING_RULES):
        return match_rule(fields, EMBEDDING_RULES)
    is_preference = any(rule.row_format.kind == kind for rule in PREFERENCE_RULES)
    try:
        return detect_format(fields, PREFERENCE_RULES if is_preference else RULES[len(PREFERENCE_RULES) :])
    except UserError:
        return None


def match_rule(fields: Mapping[str, Any], rules: Sequence[FormatRule]) -> RowFormat | None:
    """Format of the first rule whose columns a row has."""
    for row_format, types in rules:
        if all(name in fields and isinstance(fields[name], expected) for name, expected in types.items()):
            return row_format
    return None
