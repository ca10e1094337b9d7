"""Rows that are written otherwise than in OpenAI's messages, as conversations."""

import re
from os.path import commonprefix
from typing import Any

from tunekit.data.chat_template.json_values import json_type, parse_json
from tunekit.data.chat_template.messages import (
    Conversation,
    Message,
    format_value,
    make_conversation,
    parse_tool_call,
    parse_tools,
    suggest_word,
)
from tunekit.errors import UserError

LAST_WORD = re.compile(r"\s*\S*$")
SPEAKERS = {
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


def from_sharegpt(value: Any, name: str, system: Any = None, tools: Any = None) -> Conversation:
    """A conversation of `from` and `value`; messages with role and content may stand among them."""
    schemas = parse_tools(tools, "tools")
    found = make_conversation(value, name, None, said)
    head = heading(system)
    if head and found.messages[0]["role"] == "system":
        raise UserError(f"{name}[0]: a system message, and the row has a column 'system' too: which of them is meant?")
    return opened(head, found._replace(tools=schemas and [wrapped(schema) for schema in schemas]))


def opened(head: list[Message], found: Conversation) -> Conversation:
    """A conversation behind further messages."""
    flags = found.flags and [None] * len(head) + found.flags
    return found._replace(messages=head + found.messages, flags=flags) if head else found


def heading(system: Any) -> list[Message]:
    """The message that a column `system` stands for; none, if it is empty."""
    if not isinstance(system, str | None):
        raise UserError(f"system: want a string, this is {json_type(system)}")
    return [{"role": "system", "content": system}] if system else []


def said(item: Any) -> Any:
    """One item of ShareGPT as a message."""
    if not isinstance(item, dict):
        raise UserError(f": want an object with from and value, this is {json_type(item)}")
    if item.get("from") is None:
        return item
    speaker, value = item["from"], item.get("value")
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        told = f"{suggest_word(speaker, SPEAKERS)}want one of {', '.join(SPEAKERS)}"
        raise UserError(f": unknown speaker {format_value(speaker)} in `from`; {told}")
    if not isinstance(value, str):
        raise UserError(f".value: want a string, this is {json_type(value)}")
    more = {key: other for key, other in item.items() if key not in ("from", "value")}
    if speaker != "function_call":
        return {"role": SPEAKERS[speaker], "content": value, **more}
    calls = parse_json(value, ".value")
    functions = [parse_tool_call(call, ".value") for call in (calls if isinstance(calls, list) else [calls])]
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": function} for function in functions],
        **more,
    }


def wrapped(schema: dict[str, Any]) -> dict[str, Any]:
    """A tool's schema as templates expect it: ShareGPT leaves the outer object away."""
    return schema if "function" in schema or "name" not in schema else {"type": "function", "function": schema}


def from_instruct(question: str, answer: str, system: Any, history: Any) -> Conversation:
    """An instruction and its answer, behind `history`: pairs of what was asked and answered before."""
    before = [] if history is None else history
    if not isinstance(before, list):
        raise UserError(f"history: want a list of pairs, this is {json_type(before)}")
    messages = heading(system)
    for index, pair in enumerate(before):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise UserError(f"history[{index}]: want a pair of strings, a question and its answer")
        messages += exchange(*pair)
    return Conversation(messages + exchange(question, answer))


def exchange(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def join_prompt(prompt: Any, completion: Any, tools: Any, names: tuple[str, str]) -> Conversation:
    """A prompt and what follows it as one conversation, of which the prompt is not learnt; either may be a string."""
    before = as_messages(prompt, "user", names[0])
    behind = as_messages(completion, "assistant", names[1])
    found = make_conversation([*before, *behind], " + ".join(names) if before else names[1], tools)
    return found._replace(first=len(before))


def as_messages(value: Any, role: str, name: str) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise UserError(f"{name}: want a string or a list of messages, this is {json_type(value)}")
    return value


def split_preference(chosen: Any, rejected: Any, prompt: Any, tools: Any) -> list[Conversation]:
    """The two conversations of a preference, each learnt from where it leaves the other."""
    sides = [as_messages(side, "assistant", name) for side, name in ((chosen, "chosen"), (rejected, "rejected"))]
    if prompt is not None and not all(told(side, prompt) for side in sides):
        before = as_messages(prompt, "user", "prompt")
        counts = range(
            len(before), 0, -1
        )  # sides may begin with the end of the prompt, as its question behind a system
        again = next((count for count in counts if all(side[:count] == before[-count:] for side in sides)), 0)
        sides = [[*before, *side[again:]] for side in sides]
    same = common(*sides)
    return [
        make_conversation(side, name, tools)._replace(first=same)
        for side, name in zip(sides, ("chosen", "rejected"), strict=True)
    ]


def told(side: list[Any], prompt: Any) -> bool:
    """Whether a side is the whole conversation, the prompt with it."""
    if isinstance(prompt, list):
        return side[: len(prompt)] == prompt
    roles = (item["role"] for item in side if isinstance(item, dict) and "role" in item)
    return next((role for role in roles if role not in ("system", "developer")), None) == "user"


def common(one: list[Any], other: list[Any]) -> int:
    """How many messages two conversations begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


def common_prefix(one: str, other: str) -> str:
    """What two texts begin with in common, up to the end of a word: the space behind it goes with what follows."""
    return LAST_WORD.sub("", commonprefix([one, other]), count=1)
