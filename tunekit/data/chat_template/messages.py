"""A row's conversation, checked before a template sees it: templates pass over most faults in silence.

What comes out is what templates expect: text as strings, arguments of calls as objects, nothing that is null. An error
begins with the path of the fault inside the row, such as `messages[3].tool_calls[0].function.arguments`.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping, Set
from functools import lru_cache
from typing import Any, NamedTuple

from tunekit.data.chat_template.json_values import drop_null_keys, json_type, parse_json
from tunekit.errors import UserError

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING = ("reasoning_content", "thinking", "reasoning")
Message = dict[str, Any]


class Conversation(NamedTuple):
    """A conversation as a template sees it.

    `flags` says of each message whether it is to be learnt, None where the row does not say; None: it never does.
    `first` is the first message that may be learnt: those before are a prompt. `name` is their column.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    flags: list[bool | None] | None = None
    first: int = 0
    name: str = "messages"


def get_column(fields: Mapping[str, Any], name: str, option: str) -> Any:
    """A row's value of a column; `option` is the key of the config that names the column."""
    if name not in fields:
        have = ", ".join(map(str, fields)) or "none"
        raise UserError(f"the row has no column {name!r}; name the right one as `{option}` (it has: {have})")
    return fields[name]


def get_string(fields: Mapping[str, Any], name: str, option: str) -> str:
    """A row's column that must be a string."""
    value = get_column(fields, name, option)
    if not isinstance(value, str):
        raise UserError(f"{name}: want a string, this is {json_type(value)}")
    return value


def parse_json_cell(value: Any, speaker: Set[str] = frozenset({"role"})) -> Any:
    """Messages that stand in a cell as JSON, as in tables that know no lists; anything else as it is.

    Each of them has one of the keys `speaker`: another list may be a text to learn.
    """
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        found = parse_json(value, "")
    except UserError:
        return value
    said = isinstance(found, list) and found and all(isinstance(item, dict) and item.keys() & speaker for item in found)
    return found if said else value


def parse_messages(value: Any, name: str) -> list[Message]:
    """Messages of a row as a template sees them; `name` is their column."""
    return make_conversation(value, name).messages


def make_conversation(
    value: Any, name: str, tools: Any = None, message: Callable[[Any], Any] | None = None
) -> Conversation:
    """A checked conversation; `message` turns an item that is written otherwise than OpenAI does into a message."""
    value = parse_json(value, name) if isinstance(value, str) and value.strip() else value
    if not isinstance(value, list):
        raise UserError(f"{name}: want a list of messages, this is {json_type(value)}")
    if not value:
        raise UserError(f"{name}: the conversation is empty")
    messages: list[Message] = []
    flags: list[bool | None] = []
    for index, item in enumerate(value):
        try:
            item = item if message is None else message(item)
            messages.append(checked(item))
            flags.append(flag(item) if len(item) > 2 else None)
        except UserError as error:
            raise UserError(f"{name}[{index}]{error}") from None
    follow(messages, name)
    return Conversation(
        messages, parse_tools(tools, "tools"), flags if flags.count(None) < len(flags) else None, name=name
    )


def checked(item: Any) -> Message:
    """One message. What has a role and a text and nothing more is left as it is."""
    if not isinstance(item, dict):
        raise UserError(f": want an object with role and content, this is {json_type(item)}")
    role = item.get("role")
    if not isinstance(role, str) or (role not in ROLES and role != "function"):
        raise UserError(
            f": unknown role {format_value(role)}; {suggest_word(role, ROLES)}want one of {', '.join(ROLES)}"
        )
    if len(item) == 2 and role != "function" and isinstance(item.get("content"), str):
        return item
    message = {key: value for key, value in item.items() if value is not None and key not in ("train", "weight")}
    message["role"] = "tool" if role == "function" else role
    for name in ("name", "tool_call_id", *REASONING):
        if name in message and not isinstance(message[name], str):
            raise UserError(f".{name}: want a string, this is {json_type(message[name])}")
    calls(message)
    content(message, item)
    return message


def content(message: Message, item: Message) -> None:
    """Text as one string. Null beside calls stays null: templates tell it from a key that is not there."""
    value = item.get("content")
    if isinstance(value, list):
        message["content"] = "".join(map(text_of, range(len(value)), value))
    elif value is None and "tool_calls" in message:
        message |= {"content": None} if "content" in item else {}
    elif not isinstance(value, str):
        missing = " and there are no tool_calls" if value is None and message["role"] == "assistant" else ""
        raise UserError(f": content must be a string, this is {json_type(value)}{missing}")


def suggest_word(word: Any, known: Iterable[str]) -> str:
    """The known word that is most like another, as the beginning of an advice."""
    nearest = difflib.get_close_matches(word.lower(), known, 1) if isinstance(word, str) else None
    return f"did you mean {nearest[0]!r}? " if nearest else ""


def format_value(value: Any) -> str:
    """A value for a message, cut short."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def text_of(index: int, part: Any) -> str:
    """The text of a content part."""
    if not isinstance(part, dict):
        raise UserError(f".content[{index}]: want an object with type and text, this is {json_type(part)}")
    if part.get("type") != "text":
        raise UserError(
            f".content[{index}]: parts of the type {format_value(part.get('type'))} cannot be learnt: only 'text'"
        )
    if not isinstance(part.get("text"), str):
        raise UserError(f".content[{index}].text: want a string, this is {json_type(part.get('text'))}")
    return part["text"]


def calls(message: Message) -> None:
    """Calls of tools as templates expect them; one written as `function_call` becomes a list of one."""
    if "function_call" in message:
        message["tool_calls"] = [{"function": parse_tool_call(message.pop("function_call"), ".function_call")}]
    if "tool_calls" not in message:
        return
    found = message.pop("tool_calls")
    if not isinstance(found, list):
        raise UserError(f".tool_calls: want a list of calls, this is {json_type(found)}")
    if not found:
        return
    if message["role"] != "assistant":
        raise UserError(f".tool_calls: only an assistant calls tools, not a message of the role {message['role']!r}")
    message["tool_calls"] = [tool_call(call, f".tool_calls[{index}]") for index, call in enumerate(found)]


def tool_call(call: Any, path: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise UserError(f"{path}: want an object with a function, this is {json_type(call)}")
    if not isinstance(call.get("id"), str | None):
        raise UserError(f"{path}.id: want a string, this is {json_type(call['id'])}")
    bare = call.get("function") is None
    function = parse_tool_call(call, path) if bare else parse_tool_call(call["function"], f"{path}.function")
    own = ("name", "arguments") if bare else ()
    head = {key: value for key, value in call.items() if value is not None and key not in own}
    return {"type": "function", **head, "function": function}


def parse_tool_call(function: Any, path: str) -> dict[str, Any]:
    """A call's name and arguments; arguments as an object, whichever way they are written."""
    if not isinstance(function, dict):
        raise UserError(f"{path}: want an object with name and arguments, this is {json_type(function)}")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise UserError(f"{path}.name: want the name of a tool, this is {format_value(function.get('name'))}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        value = parse_json(arguments, f"{path}.arguments") if arguments.strip() else {}
    else:
        value = {} if arguments is None else drop_null_keys(arguments, f"{path}.arguments")
    if not isinstance(value, dict):
        written = " in a string" if isinstance(arguments, str) else ""
        raise UserError(f"{path}.arguments: want an object, this is {json_type(value)}{written}")
    return {"name": function["name"], "arguments": value}


def flag(item: Message) -> bool | None:
    """What a message says of itself: `train: true`, or `weight: 1` as OpenAI writes it."""
    train, weight = item.get("train"), item.get("weight")
    if train is not None and not isinstance(train, bool):
        raise UserError(f".train: want true or false, this is {json_type(train)}")
    if weight is None:
        return train
    if isinstance(weight, bool) or weight not in (0, 1):
        raise UserError(f".weight: want 0 or 1, this is {format_value(weight)}")
    if train is not None and train != bool(weight):
        raise UserError(f": train is {str(train).lower()} and weight is {weight}: which of them is meant?")
    return bool(weight)


def follow(messages: list[Message], name: str) -> None:
    """Whether each message may stand where it does. That roles take turns is left to the templates that want it."""
    systems, asked, ids = 0, False, set()  # of calls; None stands for those without an id
    for index, message in enumerate(messages):
        role = message["role"]
        if role == "assistant":
            asked = True
            for call in message.get("tool_calls", ()):
                ids.add(call.get("id"))
        elif role == "tool":
            answer = message.get("tool_call_id")
            if answer is not None and answer not in ids and None not in ids:
                raise UserError(f"{name}[{index}].tool_call_id: no call before has the id {format_value(answer)}")
            if not asked:
                raise UserError(f"{name}[{index}]: a tool's result without a call: it follows no assistant message")
        else:
            asked = False
            systems += role == "system"
            if role == "system" and systems > 1:
                raise UserError(f"{name}[{index}]: a second system message; a conversation has one")


def parse_tools(value: Any, name: str) -> list[dict[str, Any]] | None:
    """Tool schemas of a row, as a list or as JSON in a string; None if it has none."""
    if isinstance(value, str):
        return written_schemas(value, name)
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise UserError(f"{name}: want a list of tool schemas (objects), this is {json_type(value)}")
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise UserError(f"{name}[{index}]: want a tool's schema (an object), this is {json_type(item)}")
    return drop_null_keys(value, name)


@lru_cache(maxsize=256)
def written_schemas(text: str, name: str) -> list[dict[str, Any]] | None:
    """Schemas in a string. Rows of a data set share theirs, and nothing changes what it is given."""
    return parse_tools(parse_json(text, name), name) if text.strip() else None
