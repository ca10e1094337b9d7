"""Prompts of preference pairs in columns of messages, for rows without a column `prompt`."""

from collections.abc import Mapping, Sequence
from typing import Any

from tunekit.data.chat_template.converters import common_prefix, from_sharegpt, includes_prompt
from tunekit.data.chat_template.messages import Message, parse_json_cell
from tunekit.data.format_detection import MESSAGE_COLUMNS, SPEAKER_KEYS
from tunekit.errors import UserError

MIN_REPEATED_LENGTH = 20  # characters of messages that answers with a shared start repeat by more than chance


def find_prompt_column(fields: Mapping[str, Any], answers: Sequence[Any]) -> str | None:
    """Column of messages that chosen and rejected answer, each a text or a list of messages; None without one.

    Lists that start with a message of the user include their prompt, and so may texts.
    """
    if any(map(starts_with_prompt, answers)):
        return None
    parsed = ((name, parse_json_cell(fields.get(name), SPEAKER_KEYS)) for name in MESSAGE_COLUMNS)
    column, messages = next(((name, value) for name, value in parsed if isinstance(value, list) and value), (None, []))
    return None if has_repeated_prompt(messages, answers) else column


def starts_with_prompt(answer: Any) -> bool:
    """Whether an answer is a list of messages whose first one, after a system message, is of the user."""
    return isinstance(answer, list) and includes_prompt(answer, None)


def has_repeated_prompt(messages: Sequence[Any], answers: Sequence[Any]) -> bool:
    """Whether both answers are texts that start with all messages of the user."""
    if not all(isinstance(answer, str) for answer in answers):
        return False
    prefix = common_prefix(*answers)
    items = [item for item in messages if isinstance(item, dict) and "user" in (item.get("role"), item.get("from"))]
    contents = [str(item.get("content") or item.get("value")) for item in items]
    return sum(map(len, contents)) >= MIN_REPEATED_LENGTH and all(content in prefix for content in contents)


def read_prompt_messages(value: Any, column: str, answers: Sequence[Any]) -> list[Message]:
    """Messages of a prompt. One of the answers at their end is left out; UserError if there is another one."""
    messages = from_sharegpt(value, column).messages
    if messages[-1]["role"] == "assistant" and messages[-1].get("content") in map(answer_text, answers):
        messages = messages[:-1]
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        problem = "must end with the message that chosen and rejected answer"
        raise UserError(f"{column}: {problem}. Correct it, or name the column of the prompt in `columns.prompt`")
    return messages


def answer_text(answer: Any) -> Any:
    """Text of an answer: a text, or a list of messages."""
    return answer[-1].get("content") if isinstance(answer, list) and isinstance(answer[-1], dict) else answer
