"""How the columns of rows are used: no column is dropped in silence, and no serialized conversation is trained as text.

Columns that a format does not read are counted by what they may hold. A context that the model never sees makes its
answers unpredictable, while ids and metadata are expected next to the columns of a format.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, Literal, NamedTuple

from tunekit.data.chat_template.converters import SPEAKER_ROLES
from tunekit.data.chat_template.messages import REASONING_KEYS, parse_json_cell
from tunekit.data.message_text import is_message_text
from tunekit.data.transforms import RowFields

# `context`: not read, and the model does not see its value; `unread`: not read; `serialized`: read as text, but the
# text is a conversation as JSON.
Usage = Literal["context", "unread", "serialized"]
MAX_LOCATIONS = 3  # rows that are listed for a column
SPEAKER_KEYS = frozenset({"role", "from"})
ITEM_KEYS = frozenset({*SPEAKER_KEYS, "type", "id", "tool_call_id"})  # of messages, whose values are no content
# Keys of messages that are read. Chat templates get the others too, and may write them.
MESSAGE_KEYS = ITEM_KEYS | {"content", "value", "name", "tool_calls", "function_call", "weight", "train"}
MESSAGE_KEYS |= frozenset(REASONING_KEYS)  # have checks of their own
IN_MESSAGE = "[]."  # in the name of a report, between a column of messages and one of their keys
MIN_PART_LENGTH = 5  # characters of a text that may be part of another text by more than chance
MAX_COMPARED = 40  # characters of a serialized conversation that are compared

# Columns of ids, origin and statistics, which no model reads.
METADATA = frozenset({
    "id", "idx", "index", "row_id", "uid", "uuid", "guid", "hash", "key", "source", "sources", "data_source",
    "dataset", "dataset_name", "origin", "split", "subset", "category", "categories", "subcategory", "topic", "tag",
    "tags", "type", "task_type", "difficulty", "level", "domain", "lang", "language", "license", "url", "timestamp",
    "time", "date", "created_at", "updated_at", "author", "annotator", "model", "model_name", "generator", "metadata",
    "meta", "score", "rating", "quality", "reward", "reward_chosen", "reward_rejected", "score_chosen",
    "score_rejected", "finish_reason", "length", "num_tokens", "token_count", "num_turns", "token_type_ids",
    "position_ids", "special_tokens_mask", "__index_level_0__",
})  # fmt: skip
# Last words of the names of columns that models read. Names in the plural count too.
CONTEXT_WORDS = frozenset({
    "system", "prompt", "message", "conversation", "dialog", "dialogue", "chat", "history", "turn", "context",
    "document", "doc", "passage", "article", "paragraph", "abstract", "snippet", "evidence", "knowledge",
    "background", "premise", "hypothesis", "question", "query", "instruction", "input", "problem", "tool", "function",
    "api", "image", "img", "picture", "audio", "video", "choice", "option", "schema", "table", "persona", "scenario",
    "demonstration", "fewshot", "example", "exemplar", "excerpt", "chunk", "transcript", "fact", "hint", "guideline",
})  # fmt: skip
CONTEXT_NAMES = frozenset({"chat_template_kwargs", "system_prompt", "system_message", "sql_context", "queries"})
WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[\s\-.]+")
TEXT_SUFFIX = re.compile(r"(_(text|str|string|list|json|content)|_?\d+)+$")


class ColumnReport(NamedTuple):
    """A column that some rows have and do not use, or whose text is a conversation."""

    usage: Usage
    name: str
    num_rows: int
    locations: tuple[str, ...]  # of the first rows

    def __add__(self, other: "ColumnReport") -> "ColumnReport":  # type: ignore[override]
        """Report on these rows and further ones."""
        locations = (self.locations + other.locations)[:MAX_LOCATIONS]
        return self._replace(num_rows=self.num_rows + other.num_rows, locations=locations)


class ColumnUsage:
    """Counts the columns of rows that are not used, or whose text is a conversation."""

    def __init__(self) -> None:
        self.by_column: dict[tuple[Usage, str], ColumnReport] = {}

    def add(self, where: str, fields: RowFields, render: Callable[[], str]) -> None:
        """Add a row whose format has read `fields`. `render` returns the text that the model sees."""
        rendered = SeenText(fields, render)
        for name, value in fields.items():
            if name not in fields.reads:
                if is_reported(name) and has_content(value):
                    usage = "context" if is_context(name) and not rendered.contains(value) else "unread"
                    self.count(ColumnReport(usage, name, 1, (where,)))
                continue
            if any(rendered.has_raw(text) for text in iter_serialized(value)):
                self.count(ColumnReport("serialized", name, 1, (where,)))
            for key in unseen_message_keys(value, rendered):
                usage = "context" if is_context(key) else "unread"
                self.count(ColumnReport(usage, f"{name}{IN_MESSAGE}{key}", 1, (where,)))

    def count(self, report: ColumnReport) -> None:
        """Add a report."""
        key = report.usage, report.name
        self.by_column[key] = self.by_column[key] + report if key in self.by_column else report

    @property
    def reports(self) -> tuple[ColumnReport, ...]:
        """Reports by column, in the order in which rows have them."""
        return tuple(self.by_column.values())


def merge_reports(*groups: tuple[ColumnReport, ...]) -> tuple[ColumnReport, ...]:
    """Reports on all rows of some groups of rows."""
    usage = ColumnUsage()
    for report in chain.from_iterable(groups):
        usage.count(report)
    return usage.reports


def read_reports(values: Iterable[Any]) -> tuple[ColumnReport, ...]:
    """Reports from the lists that JSON makes of them."""
    return tuple(ColumnReport(usage, name, num_rows, tuple(locations)) for usage, name, num_rows, locations in values)


class SeenText:
    """Text of a row that the model sees: of the columns that are read, and of its documents, rendered when needed."""

    def __init__(self, fields: RowFields, render: Callable[[], str]) -> None:
        self.fields, self.render = fields, render

    @cached_property
    def columns(self) -> list[str]:
        """Texts in the columns that are read."""
        return [text for name, value in self.fields.items() if name in self.fields.reads for text in iter_texts(value)]

    @cached_property
    def rendered(self) -> str:
        return self.render()

    def contains(self, value: Any) -> bool:
        """Whether all texts of a value are seen. Other content, such as the bytes of an image, never is."""
        texts = [text.strip() for text in iter_texts(without_answer(value)) if text.strip()]
        return bool(texts) and all(self.contains_text(text) for text in texts)

    def contains_text(self, text: str) -> bool:
        """Whether a text is a text of the row, or is part of one between other words."""
        if any(text == column.strip() for column in self.columns):
            return True
        if len(text) < MIN_PART_LENGTH:
            return False
        pattern = re.compile(rf"(?<!\w){re.escape(text)}(?!\w)")
        return any(pattern.search(column) for column in self.columns) or pattern.search(self.rendered) is not None

    def has_raw(self, text: str) -> bool:
        """Whether the model sees a text itself, and not the messages that it contains.

        Compares its start: documents may be truncated, and some tokenizers change spaces and case.
        """
        return normalize_spaces(text)[:MAX_COMPARED] in normalize_spaces(self.rendered)


def normalize_spaces(text: str) -> str:
    """Text without white space, in lower case."""
    return "".join(text.lower().split())


@lru_cache(maxsize=1024)
def words_of(name: str) -> str:
    """Name of a column in snake_case, without a suffix such as `_text` or a number: `userPrompts_1` is user_prompts."""
    name = WORD_START.sub("_", name).lower().strip("_")
    return TEXT_SUFFIX.sub("", name) or name


@lru_cache(maxsize=1024)
def is_reported(name: str) -> bool:
    """Whether a column that is not read is reported: not ids and metadata."""
    name = WORD_START.sub("_", name).lower()
    return name not in METADATA and not name.endswith(("_id", "_ids", "_idx", "_hash", "_uuid"))


@lru_cache(maxsize=1024)
def is_context(name: str) -> bool:
    """Whether models usually read a column with this name."""
    name = words_of(name)
    last = name.rpartition("_")[2]
    return name in CONTEXT_NAMES or last in CONTEXT_WORDS or last.removesuffix("s") in CONTEXT_WORDS


def has_content(value: Any) -> bool:
    """Whether a value is not empty. Typed tables store empty values in rows without one."""
    if isinstance(value, str):
        return value.strip() not in ("", "[]", "{}")
    if isinstance(value, dict | list | tuple):
        return any(map(has_content, value.values() if isinstance(value, dict) else value))
    return value is not None


def without_answer(value: Any) -> Any:
    """A conversation without the answers at its end: they are no context. Any other value is returned unchanged."""
    messages = parse_json_cell(value, SPEAKER_KEYS)
    if not isinstance(messages, list):
        return value
    while messages and isinstance(messages[-1], dict) and speaker_role(messages[-1]) == "assistant":
        messages = messages[:-1]
    return messages


def speaker_role(item: Mapping[str, Any]) -> str | None:
    """Role of a message in the format of OpenAI or of ShareGPT."""
    speaker = item.get("role") or item.get("from")
    return SPEAKER_ROLES.get(speaker, speaker) if isinstance(speaker, str) else None


def iter_texts(value: Any) -> Iterator[str]:
    """All texts of a value; of messages, without their roles and ids."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        is_item = speaker_role(value) is not None
        yield from (
            text for key, item in value.items() if not (is_item and key in ITEM_KEYS) for text in iter_texts(item)
        )
    elif isinstance(value, list | tuple):
        yield from chain.from_iterable(map(iter_texts, value))


def unseen_message_keys(value: Any, seen: SeenText) -> list[str]:
    """Keys of the messages of a column whose texts the chat template does not write; none before it is rendered."""
    items = parse_json_cell(value, SPEAKER_KEYS)
    texts = (
        (key, text)
        for message in (items if isinstance(items, list) else ())
        if isinstance(message, dict) and speaker_role(message)
        for key in message.keys() - MESSAGE_KEYS
        if isinstance(key, str) and is_reported(key)
        for text in iter_texts(message[key])
    )
    return sorted({key for key, text in texts if text.strip() and seen.rendered and not seen.has_raw(text)})


def iter_serialized(value: Any) -> Iterator[str]:
    """Texts of a column that are a conversation: its value, or the content of one of its messages."""
    if isinstance(value, str):
        if is_message_text(value):
            yield value
    elif isinstance(value, list):
        for item in value:
            is_result = isinstance(item, dict) and speaker_role(item) == "tool"
            contents = (item.get("content"), item.get("value")) if isinstance(item, dict) else (item,)
            yield from (text for text in contents if not is_result and isinstance(text, str) and is_message_text(text))
