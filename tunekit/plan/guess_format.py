"""A format for rows whose columns have other names than those that are known: conversations, or texts."""

from collections.abc import Mapping, Sequence
from typing import Any

from tunekit.data.chat_template.messages import parse_json_cell
from tunekit.data.format_detection import SPEAKER_KEYS, RowFormat, is_sharegpt

Fields = Mapping[str, Any]
PROMPTS = ("prompt", "question", "instruction", "query", "input", "user", "human")
ANSWERS = ("answer", "output", "response", "completion", "target", "assistant", "reply")


def guess_format(rows: Sequence[Fields]) -> RowFormat | None:
    """Format of most rows: messages, a prompt and its answer, or plain text; None if there are no texts."""
    names = [*dict.fromkeys(name for fields in rows for name in fields)]
    values = {name: [fields[name] for fields in rows if fields.get(name) is not None] for name in names}
    chats = (name for name, column in values.items() if 2 * sum(map(is_conversation, column)) > len(rows))
    if (chat := next(chats, None)) is not None:
        is_other = is_sharegpt(parse_json_cell(next(filter(is_conversation, values[chat])), SPEAKER_KEYS))
        kind, key = ("sharegpt", "conversations_column") if is_other else ("chat", "messages_column")
        return RowFormat(kind, ((key, chat),), f"messages in column {chat!r}")
    texts = {name: [value for value in column if isinstance(value, str)] for name, column in values.items()}
    texts = {name: column for name, column in texts.items() if 2 * len(column) > len(rows)}
    prompt, answer = find_prompt_and_answer(texts)
    if prompt is None and answer is not None:
        return RowFormat("text", (("text_column", answer),), f"texts in column {answer!r}")
    if prompt is None or answer is None:
        return None
    columns = (("prompt_column", prompt), ("response_column", answer))
    if "input" in names:
        columns = (*columns, ("input_column", None))
    unused = ", ".join(repr(name) for name in names if name not in (prompt, answer))
    suffix = f"; {unused} {'are' if ',' in unused else 'is'} not used" if unused else ""
    return RowFormat("instruct", columns, f"prompts in column {prompt!r}, answers in column {answer!r}{suffix}")


def is_conversation(value: Any) -> bool:
    """Whether a value is a list of messages, or a JSON string of one."""
    items = parse_json_cell(value, SPEAKER_KEYS)
    is_list = isinstance(items, list) and bool(items)
    return is_list and all(isinstance(item, dict) and item.keys() & SPEAKER_KEYS for item in items)


def find_prompt_and_answer(texts: Mapping[str, Sequence[str]]) -> tuple[str | None, str | None]:
    """Columns of the prompt and of the answer: those with usual names, or else the longest texts, in their order.

    Without a prompt, the answer is plain text.
    """
    prompt = next((name for name in PROMPTS if name in texts), None)
    answer = next((name for name in ANSWERS if name in texts), None)
    others = sorted(
        (name for name in texts if name not in (prompt, answer)), key=lambda name: -mean_length(texts[name])
    )
    if prompt is None and answer is None and len(others) > 1:
        first, second = (name for name in texts if name in others[:2])
        return first, second
    if answer is None:
        return prompt, next(iter(others), None)
    return prompt or next(iter(others), None), answer


def mean_length(column: Sequence[str]) -> float:
    return sum(map(len, column)) / max(1, len(column))
