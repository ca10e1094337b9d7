"""Validation and normalization of conversations before they are rendered: templates ignore most errors silently.

Content becomes a string, tool call arguments become objects, and null values are removed. Error messages start with the
path inside the row, such as `messages[3].tool_calls[0].function.arguments`.
"""

import json
from collections.abc import Callable, Mapping, Sequence, Set
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

from tunekit.data.readers.row_reader import UnreadableCell, json_type
from tunekit.errors import UserError, did_you_mean

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
MAX_DEPTH = 64  # nesting limit: schemas and arguments are flatter, and Python's recursion is limited
MIN_WEIGHT = 1e-6  # of a message; far smaller weights are 0 in fp32
Message = dict[str, Any]
Messages = Sequence[Mapping[str, Any]]
Tools = list[dict[str, Any]] | None  # JSON schemas


class Conversation(NamedTuple):
    """Normalized messages and tools, ready to be rendered by a chat template."""

    messages: list[Message]
    tools: Tools = None
    train_flags: Mapping[int, bool | float] = {}  # `train` or `weight`, by index of the messages with one
    num_prompt_messages: int = 0  # leading messages that are never targets
    column: str = "messages"  # where the messages are from, for error messages


def messages_to_answer(messages: list[Message]) -> list[Message]:
    """Messages without the answers at their end; empty if the last one left is not of role user or tool."""
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    return messages if messages and messages[-1]["role"] in ("user", "tool") else []


class JSONArguments(dict[str, Any]):
    """Arguments of a call that a row stores as a JSON string, which some templates write as it is."""

    def __init__(self, values: Mapping[str, Any], json_text: str) -> None:
        super().__init__(values)
        self.json_text = json_text


class MissingColumnError(UserError):
    """A row without a column that its kind needs."""


def get_column(fields: Mapping[str, Any], columns: Mapping[str, str | None], role: str) -> Any:
    """Return the column of a row that has a role in `columns`."""
    name = columns[role]
    assert name is not None, "a role whose column is not known yet"
    if name not in fields:
        names = ", ".join(map(str, fields)) or "none"
        raise MissingColumnError(f"the row has no column {name!r} (columns: {names}). Set `columns.{role}`.")
    if isinstance(value := fields[name], UnreadableCell):
        value.raise_error()
    return value


def get_optional_column(fields: Mapping[str, Any], columns: Mapping[str, str | None], role: str) -> Any:
    """Return a column that rows may lack unless a config names it: None without it. Its default name is its role."""
    return None if columns[role] == role and role not in fields else get_column(fields, columns, role)


def get_string(fields: Mapping[str, Any], columns: Mapping[str, str | None], role: str) -> str:
    """Return a column of a row that must be a string."""
    value = get_column(fields, columns, role)
    if not isinstance(value, str):
        raise UserError(f"{columns[role]}: expected a string, got {json_type(value)}")
    return value


def parse_json_cell(value: Any, role_keys: Set[str] = frozenset({"role"})) -> Any:
    """Parse messages that are stored as a JSON string, as in CSV files. Return any other value unchanged.

    A list counts as messages if each item is an object with one of `role_keys`: other lists may be training text. An
    object counts as one message if it has a role and content: it becomes a list.
    """
    if isinstance(value, dict):
        return [value] if is_single_message(value) else value
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        items = parse_json(value, "")
    except UserError:
        return value
    if isinstance(items, dict) and is_single_message(items):
        return [items]
    is_list = isinstance(items, list) and items
    return items if is_list and all(isinstance(item, dict) and item.keys() & role_keys for item in items) else value


def is_single_message(item: Mapping[str, Any]) -> bool:
    """Whether an object is a message: a known role with content or tool calls. Other objects may be answers."""
    return item.get("role") in (*ROLES, "function") and bool(item.keys() & {"content", "tool_calls", "function_call"})


def make_conversation(
    value: Any, column: str, tools: Any = None, to_message: Callable[[Any], Any] | None = None
) -> Conversation:
    """Validate and normalize a conversation. `column` is for error messages.

    `to_message` converts items in another format to OpenAI messages.
    """
    value = parse_json(value, column) if isinstance(value, str) and value.strip() else value
    if not isinstance(value, list):
        raise UserError(f"{column}: expected a list of messages, got {json_type(value)}")
    if not value:
        raise UserError(f"{column}: the conversation is empty")
    messages: list[Message] = []
    train_flags: dict[int, bool | float] = {}
    for index, item in enumerate(value):
        try:
            item = item if to_message is None else to_message(item)
            messages.append(normalize_message(item))
            if len(item) > 2 and (flag := parse_train_flag(item)) is not None:
                train_flags[index] = flag
        except UserError as error:
            raise UserError(f"{column}[{index}]{error}") from None
    check_message_order(messages, column)
    return Conversation(messages, parse_tools(tools, "tools"), train_flags, column=column)


def normalize_message(item: Any) -> Message:
    """Validate and normalize one message. A message with only a role and a string is returned unchanged."""
    if not isinstance(item, dict):
        raise UserError(f": expected an object with `role` and `content`, got {json_type(item)}")
    role = item.get("role")
    if role is None:
        raise UserError(": has no `role`")
    if not isinstance(role, str) or (role not in ROLES and role != "function"):
        hint = did_you_mean(str(role), ROLES)
        raise UserError(f".role: unknown role {format_value(role)}.{hint} Use one of {', '.join(ROLES)}.")
    if len(item) == 2 and role != "function" and isinstance(item.get("content"), str):
        return item
    message = {key: value for key, value in item.items() if value is not None and key not in ("train", "weight")}
    message["role"] = "tool" if role == "function" else role
    for name in ("name", "tool_call_id", *REASONING_KEYS):
        if name in message and not isinstance(message[name], str):
            raise UserError(f".{name}: expected a string, got {json_type(message[name])}")
    normalize_tool_calls(message)
    normalize_content(message, item)
    return message


def normalize_content(message: Message, item: Message) -> None:
    """Join content parts to one string. With tool calls, null stays null: templates distinguish it from no key."""
    value = item.get("content")
    if isinstance(value, list):
        message["content"] = "".join(map(content_part_text, range(len(value)), value))
    elif value is None and "tool_calls" in message:
        message |= {"content": None} if "content" in item else {}
    elif not isinstance(value, str):
        suffix = " and no `tool_calls`" if value is None and message["role"] == "assistant" else ""
        raise UserError(f".content: expected a string, got {json_type(value)}{suffix}")


def format_value(value: Any) -> str:
    """Format a value for an error message, truncated to 40 characters."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def content_part_text(index: int, part: Any) -> str:
    """Return the text of a content part, an object with `type` and `text`."""
    if not isinstance(part, dict):
        raise UserError(f".content[{index}]: expected an object with `type` and `text`, got {json_type(part)}")
    if part.get("type") != "text":
        raise UserError(f".content[{index}].type: only 'text' is supported, got {format_value(part.get('type'))}")
    if not isinstance(part.get("text"), str):
        raise UserError(f".content[{index}].text: expected a string, got {json_type(part.get('text'))}")
    return part["text"]


def normalize_tool_calls(message: Message) -> None:
    """Normalize tool calls in place. The deprecated `function_call` becomes a list of one call."""
    if "function_call" in message:
        message["tool_calls"] = [{"function": parse_tool_call(message.pop("function_call"), ".function_call")}]
    if "tool_calls" not in message:
        return
    calls = message.pop("tool_calls")
    if not isinstance(calls, list):
        raise UserError(f".tool_calls: expected a list, got {json_type(calls)}")
    if not calls:
        return
    if message["role"] != "assistant":
        raise UserError(f".tool_calls: allowed only in assistant messages, got role {message['role']!r}")
    message["tool_calls"] = [normalize_tool_call(call, f".tool_calls[{index}]") for index, call in enumerate(calls)]


def normalize_tool_call(call: Any, path: str) -> dict[str, Any]:
    """Convert a call to `{"type": "function", "id": ..., "function": {"name": ..., "arguments": {...}}}`."""
    if not isinstance(call, dict):
        raise UserError(f"{path}: expected an object with `function`, got {json_type(call)}")
    if not isinstance(call.get("id"), str | None):
        raise UserError(f"{path}.id: expected a string, got {json_type(call['id'])}")
    is_flat = call.get("function") is None
    function = parse_tool_call(call, path) if is_flat else parse_tool_call(call["function"], f"{path}.function")
    function_keys = ("name", "arguments") if is_flat else ()
    fields = {key: value for key, value in call.items() if value is not None and key not in function_keys}
    return {"type": "function", **fields, "function": function}


def parse_tool_call(function: Any, path: str) -> dict[str, Any]:
    """Return the name and the arguments of a call. Arguments may be an object, a JSON string, or null."""
    if not isinstance(function, dict):
        raise UserError(f"{path}: expected an object with `name` and `arguments`, got {json_type(function)}")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise UserError(f"{path}.name: expected the name of a tool, got {format_value(function.get('name'))}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        value = parse_json(arguments, f"{path}.arguments") if arguments.strip() else {}
    else:
        value = {} if arguments is None else drop_null_keys(arguments, f"{path}.arguments")
    if not isinstance(value, dict):
        suffix = " in a string" if isinstance(arguments, str) else ""
        raise UserError(f"{path}.arguments: expected an object, got {json_type(value)}{suffix}")
    if isinstance(arguments, str) and arguments.strip():
        value = JSONArguments(value, arguments)
    return {"name": function["name"], "arguments": value}


def arguments_text(arguments: Mapping[str, Any]) -> str:
    """Return arguments of a call as JSON: the string of the row if it has one."""
    return arguments.json_text if isinstance(arguments, JSONArguments) else json.dumps(arguments, ensure_ascii=False)


def parse_train_flag(item: Message) -> bool | float | None:
    """Return the loss weight of a message, from 0 to 1: its `weight`, or its `train`, a boolean; None if unmarked."""
    train, weight = item.get("train"), item.get("weight")
    if train is not None and not isinstance(train, bool):
        raise UserError(f".train: expected a boolean, got {json_type(train)}")
    if weight is None:
        return train
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not (weight == 0 or MIN_WEIGHT <= weight <= 1):
        raise UserError(f".weight: must be 0, or from {MIN_WEIGHT:g} to 1, got {format_value(weight)}")
    if train is not None and train != bool(weight):
        raise UserError(f": `train` is {str(train).lower()}, but `weight` is {weight}. Remove one of them.")
    return float(weight)


def check_message_order(messages: list[Message], column: str) -> None:
    """Check tool results and the number of system messages. Templates that require alternating roles check that."""
    num_system, after_assistant, call_ids = 0, False, set()  # None in call_ids: a call without an id
    for index, message in enumerate(messages):
        role = message["role"]
        if role == "assistant":
            after_assistant = True
            for call in message.get("tool_calls", ()):
                call_ids.add(call.get("id"))
        elif role == "tool":
            call_id = message.get("tool_call_id")
            if call_id is not None and call_id not in call_ids and None not in call_ids:
                raise UserError(f"{column}[{index}].tool_call_id: no earlier call has the id {format_value(call_id)}")
            if not after_assistant:
                raise UserError(f"{column}[{index}]: tool result does not follow an assistant message")
        else:
            after_assistant = False
            num_system += role == "system"
            if role == "system" and num_system > 1:
                raise UserError(f"{column}[{index}]: second system message, at most one is allowed")


def parse_tools(value: Any, name: str) -> Tools:
    """Parse the tool schemas of a row, a list or a JSON string. Return None if there are none."""
    if isinstance(value, str):
        return parse_schema_string(value, name)
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise UserError(f"{name}: expected a list of tool schemas, got {json_type(value)}")
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise UserError(f"{name}[{index}]: expected a tool schema (an object), got {json_type(item)}")
    return drop_null_keys(value, name)


@lru_cache(maxsize=256)
def parse_schema_string(text: str, name: str) -> Tools:
    """Parse tool schemas from a JSON string. Cached: rows of a dataset share schemas. Do not modify the result."""
    return parse_tools(parse_json(text, name), name) if text.strip() else None


def parse_json(text: str, path: str) -> Any:
    """Parse a JSON string. Raise UserError, prefixed with `path`, if it is invalid."""
    try:
        return json.loads(text, parse_constant=reject_constant)
    except RecursionError:
        raise UserError(f"{path}: JSON string is nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{path}: string is not valid JSON: {error}") from None


def reject_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not allowed in JSON")


def drop_null_keys(value: Any, path: str, depth: int = 0) -> Any:
    """Remove keys whose value is null: tables with typed columns store every key in every row."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise UserError(f"{path}: {value} is not allowed in JSON")
        return value
    if depth == MAX_DEPTH:
        raise UserError(f"{path}: nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, list):
        return [drop_null_keys(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON value, got {json_type(value)}")
    for key in value:
        if not isinstance(key, str):
            raise UserError(f"{path}: keys must be strings, got {key!r}")
    return {key: drop_null_keys(item, f"{path}.{key}", depth + 1) for key, item in value.items() if item is not None}
