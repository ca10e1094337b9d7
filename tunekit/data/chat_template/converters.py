"""Converters from ShareGPT, instruction, prompt/completion, and preference rows to conversations."""

import re
from collections.abc import Mapping
from os.path import commonprefix
from typing import Any

from tunekit.data.chat_template.messages import (
    Conversation,
    Message,
    format_value,
    json_type,
    make_conversation,
    parse_json,
    parse_tool_call,
    parse_tools,
)
from tunekit.errors import UserError, did_you_mean

SYSTEM_COLUMNS = ("system", "system_prompt")
LAST_WORD = re.compile(r"\s*\S*$")
SPEAKER_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "observation": "tool",
    "function_response": "tool",
    "tool": "tool",
}


def from_sharegpt(value: Any, column: str, system: Any = None, tools: Any = None) -> Conversation:
    """Convert a ShareGPT conversation (`from`, `value`). Items with `role` and `content` are accepted too."""
    schemas = parse_tools(tools, "tools")
    conversation = with_system(make_conversation(value, column, None, from_sharegpt_item), system, column)
    return conversation._replace(tools=schemas and [wrap_tool_schema(schema) for schema in schemas])


def get_system(fields: Mapping[str, Any]) -> Any:
    """Value of the column with the system message of a row; None without one."""
    values = (fields.get(name) for name in SYSTEM_COLUMNS)
    return next((value for value in values if value not in (None, "")), None)


def with_system(conversation: Conversation, system: Any, column: str) -> Conversation:
    """Conversation that starts with the system message of another column. Raise UserError if it has another one."""
    messages = add_system(conversation.messages, system, column)
    count = len(messages) - len(conversation.messages)
    return conversation._replace(
        messages=messages,
        train_flags={index + count: flag for index, flag in conversation.train_flags.items()},
        num_prompt_messages=conversation.num_prompt_messages and conversation.num_prompt_messages + count,
    )


def add_system(messages: list[Any], system: Any, column: str) -> list[Any]:
    """Messages that start with the system message of another column. Raise UserError if they have another one."""
    system_messages = to_system_messages(system)
    if not system_messages or messages[:1] == system_messages:
        return messages
    if messages and isinstance(messages[0], dict) and messages[0].get("role") in ("system", "developer"):
        raise UserError(f"{column}[0]: the row has a system message and a column 'system'. Remove one of them.")
    return system_messages + messages


def to_system_messages(system: Any) -> list[Message]:
    """Convert the value of a column `system` to a list of one message; empty for None or ''."""
    if not isinstance(system, str | None):
        raise UserError(f"system: expected a string, got {json_type(system)}")
    return [{"role": "system", "content": system}] if system else []


def from_sharegpt_item(item: Any) -> Any:
    """Convert one ShareGPT item to an OpenAI message."""
    if not isinstance(item, dict):
        raise UserError(f": expected an object with `from` and `value`, got {json_type(item)}")
    if item.get("from") is None:
        return item
    speaker, value = item["from"], item.get("value")
    if not isinstance(speaker, str) or speaker not in SPEAKER_ROLES:
        hint = did_you_mean(str(speaker), SPEAKER_ROLES)
        roles = ", ".join(SPEAKER_ROLES)
        raise UserError(f".from: unknown speaker {format_value(speaker)}.{hint} Use one of {roles}.")
    if not isinstance(value, str):
        raise UserError(f".value: expected a string, got {json_type(value)}")
    extra_fields = {key: field for key, field in item.items() if key not in ("from", "value")}
    if speaker != "function_call":
        return {"role": SPEAKER_ROLES[speaker], "content": value, **extra_fields}
    calls = parse_json(value, ".value")
    functions = [parse_tool_call(call, ".value") for call in (calls if isinstance(calls, list) else [calls])]
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": function} for function in functions],
        **extra_fields,
    }


def wrap_tool_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Add the outer object that templates expect and ShareGPT omits: `{"type": "function", "function": schema}`."""
    return schema if "function" in schema or "name" not in schema else {"type": "function", "function": schema}


def from_instruct(question: str, answer: str, system: Any, history: Any) -> Conversation:
    """Convert an instruction and its answer. `history` is a list of earlier (question, answer) pairs."""
    pairs = [] if history is None else history
    if not isinstance(pairs, list):
        raise UserError(f"history: expected a list of pairs, got {json_type(pairs)}")
    messages = to_system_messages(system)
    for index, pair in enumerate(pairs):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise UserError(f"history[{index}]: must be a pair of strings (question, answer)")
        messages += to_exchange(*pair)
    return Conversation(messages + to_exchange(question, answer))


def to_exchange(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def join_prompt(prompt: Any, completion: Any, tools: Any, columns: tuple[str, str], system: Any = None) -> Conversation:
    """Join a prompt and its completion. Prompt messages are not targets. Each may be a string or a list of messages."""
    prompt_messages = add_system(to_messages(prompt, "user", columns[0]), system, columns[0])
    completion_messages = to_messages(completion, "assistant", columns[1])
    column = " + ".join(columns) if prompt_messages else columns[1]
    conversation = make_conversation([*prompt_messages, *completion_messages], column, tools)
    return conversation._replace(num_prompt_messages=len(prompt_messages))


def to_messages(value: Any, role: str, column: str) -> list[Any]:
    """Convert a string to a list of one message with this role; None becomes an empty list."""
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise UserError(f"{column}: expected a string or a list of messages, got {json_type(value)}")
    return value


def split_preference(chosen: Any, rejected: Any, prompt: Any, tools: Any, system: Any = None) -> list[Conversation]:
    """Return the chosen and the rejected conversation. Their common leading messages are the prompt.

    `chosen` and `rejected` may contain all of the prompt, the end of it, or none of it.
    """
    sides = [to_messages(side, "assistant", name) for side, name in ((chosen, "chosen"), (rejected, "rejected"))]
    if prompt is not None and not all(includes_prompt(side, prompt) for side in sides):
        prompt_messages = to_messages(prompt, "user", "prompt")
        counts = range(len(prompt_messages), 0, -1)
        overlaps = (n for n in counts if all(side[:n] == prompt_messages[-n:] for side in sides))
        overlap = next(overlaps, 0)  # for example, the question again but not the system message
        sides = [[*prompt_messages, *side[overlap:]] for side in sides]
    sides = [add_system(side, system, name) for side, name in zip(sides, ("chosen", "rejected"), strict=True)]
    num_common = count_common_messages(*sides)
    return [
        make_conversation(side, name, tools)._replace(num_prompt_messages=num_common)
        for side, name in zip(sides, ("chosen", "rejected"), strict=True)
    ]


def includes_prompt(side: list[Any], prompt: Any) -> bool:
    """Whether a chosen or rejected conversation starts with its prompt."""
    if isinstance(prompt, list):
        return side[: len(prompt)] == prompt
    roles = (item["role"] for item in side if isinstance(item, dict) and "role" in item)
    return next((role for role in roles if role not in ("system", "developer")), None) == "user"


def count_common_messages(first: list[Any], second: list[Any]) -> int:
    """Count the common leading messages of two conversations."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


def common_prefix(first: str, second: str) -> str:
    """Return the common prefix of two texts, cut at the end of a word and without trailing whitespace."""
    return LAST_WORD.sub("", commonprefix([first, second]), count=1)
