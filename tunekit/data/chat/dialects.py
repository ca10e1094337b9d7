"""Rows that are written otherwise than in OpenAI's messages, as conversations."""

import re
from os.path import commonprefix
from typing import Any

from tunekit.data.chat.messages import Message, Talk, call_of, meant, shown, talk, tool_schemas
from tunekit.data.chat.plain import kind, parsed
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


def sharegpt(value: Any, name: str, system: Any = None, tools: Any = None) -> Talk:
    """A conversation of `from` and `value`; messages with role and content may stand among them."""
    schemas = tool_schemas(tools, "tools")
    found = talk(value, name, None, said)
    head = heading(system)
    if head and found.messages[0]["role"] == "system":
        raise UserError(f"{name}[0]: a system message, and the row has a column 'system' too: which of them is meant?")
    return opened(head, found._replace(tools=schemas and [wrapped(schema) for schema in schemas]))


def opened(head: list[Message], found: Talk) -> Talk:
    """A conversation behind further messages."""
    flags = found.flags and [None] * len(head) + found.flags
    return found._replace(messages=head + found.messages, flags=flags) if head else found


def heading(system: Any) -> list[Message]:
    """The message that a column `system` stands for; none, if it is empty."""
    if not isinstance(system, str | None):
        raise UserError(f"system: want a string, this is {kind(system)}")
    return [{"role": "system", "content": system}] if system else []


def said(item: Any) -> Any:
    """One item of ShareGPT as a message."""
    if not isinstance(item, dict):
        raise UserError(f": want an object with from and value, this is {kind(item)}")
    if item.get("from") is None:
        return item
    speaker, value = item["from"], item.get("value")
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        told = f"{meant(speaker, SPEAKERS)}want one of {', '.join(SPEAKERS)}"
        raise UserError(f": unknown speaker {shown(speaker)} in `from`; {told}")
    if not isinstance(value, str):
        raise UserError(f".value: want a string, this is {kind(value)}")
    more = {key: other for key, other in item.items() if key not in ("from", "value")}
    if speaker != "function_call":
        return {"role": SPEAKERS[speaker], "content": value, **more}
    calls = parsed(value, ".value")
    functions = [call_of(call, ".value") for call in (calls if isinstance(calls, list) else [calls])]
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": function} for function in functions],
        **more,
    }


def wrapped(schema: dict[str, Any]) -> dict[str, Any]:
    """A tool's schema as templates expect it: ShareGPT leaves the outer object away."""
    return schema if "function" in schema or "name" not in schema else {"type": "function", "function": schema}


def instruction(question: str, answer: str, system: Any, history: Any) -> Talk:
    """An instruction and its answer, behind `history`: pairs of what was asked and answered before."""
    before = [] if history is None else history
    if not isinstance(before, list):
        raise UserError(f"history: want a list of pairs, this is {kind(before)}")
    messages = heading(system)
    for index, pair in enumerate(before):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise UserError(f"history[{index}]: want a pair of strings, a question and its answer")
        messages += exchange(*pair)
    return Talk(messages + exchange(question, answer))


def exchange(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def joined(prompt: Any, completion: Any, tools: Any, names: tuple[str, str]) -> Talk:
    """A prompt and what follows it as one conversation, of which the prompt is not learnt; either may be a string."""
    before = as_messages(prompt, "user", names[0])
    behind = as_messages(completion, "assistant", names[1])
    found = talk([*before, *behind], " + ".join(names) if before else names[1], tools)
    return found._replace(first=len(before))


def as_messages(value: Any, role: str, name: str) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise UserError(f"{name}: want a string or a list of messages, this is {kind(value)}")
    return value


def pair(chosen: Any, rejected: Any, prompt: Any, tools: Any) -> list[Talk]:
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
        talk(side, name, tools)._replace(first=same) for side, name in zip(sides, ("chosen", "rejected"), strict=True)
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


def common_text(one: str, other: str) -> str:
    """What two texts begin with in common, up to the end of a word: the space behind it goes with what follows."""
    return LAST_WORD.sub("", commonprefix([one, other]), count=1)
