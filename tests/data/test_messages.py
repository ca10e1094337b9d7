"""A conversation as templates expect it, whichever way a row writes it; and what is wrong, by its path in the row."""

from copy import deepcopy

import pytest

from tunekit.data.chat_template.messages import make_conversation, parse_messages
from tunekit.errors import UserError

ASK = {"role": "user", "content": "What is 1 + 2?"}
SAY = {"role": "assistant", "content": "3"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "3"}


def test_a_plain_conversation_is_left_as_it_is() -> None:
    rows = [{"role": "system", "content": "Be brief."}, ASK, SAY]
    found = parse_messages(rows, "messages")
    assert found == rows and all(a is b for a, b in zip(found, rows, strict=True)), "no copies: rows are many"


@pytest.mark.parametrize(
    "call",
    [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}},
        {"id": "c1", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}},
        {"id": "c1", "name": "add", "arguments": {"a": 1, "b": 2}},
        # as tables with typed columns give it back
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2, "city": None}}},
    ],
)
def test_calls_are_given_as_templates_expect_them(call: dict) -> None:
    rows = [ASK, {**CALL, "tool_calls": [call]}, RESULT]
    before = deepcopy(rows)
    assert parse_messages(rows, "messages") == [ASK, CALL, RESULT]
    assert rows == before, "a row is not changed"


def test_what_a_json_string_says_is_kept_to_the_letter() -> None:
    call = {"function": {"name": "find", "arguments": '{"limit": null, "of": {"x": [1, null]}}'}}
    (_, message) = parse_messages([ASK, {"role": "assistant", "content": "", "tool_calls": [call]}], "messages")
    assert message["tool_calls"][0]["function"]["arguments"] == {"limit": None, "of": {"x": [1, None]}}
    call = {"function": {"name": "now", "arguments": ""}}
    (_, message) = parse_messages([ASK, {"role": "assistant", "tool_calls": [call]}], "messages")
    assert message == {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "now", "arguments": {}}}],
    }


def test_older_names_of_calls_and_results() -> None:
    rows = [
        ASK,
        {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "add", "content": "3"},
    ]
    assert parse_messages(rows, "messages") == [
        ASK,
        {**CALL, "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]},
        {"role": "tool", "name": "add", "content": "3"},
    ]


def test_null_columns_count_as_absent() -> None:
    nulls = dict.fromkeys(("name", "tool_calls", "tool_call_id", "reasoning_content", "function_call", "weight"))
    assert parse_messages([{**ASK, **nulls}, {**SAY, **nulls}], "messages") == [ASK, SAY]
    assert make_conversation([{**ASK, **nulls}, {**SAY, **nulls}], "messages").flags is None
    empty = {**SAY, "tool_calls": []}
    assert parse_messages([ASK, empty], "messages") == [ASK, SAY]


def test_content_parts_are_one_text() -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "1 + 2?", "image_url": None}]
    assert parse_messages([{"role": "user", "content": parts}, SAY], "messages") == [ASK, SAY]


def test_reasoning_is_kept() -> None:
    rows = [ASK, {**SAY, "reasoning_content": "One and two."}]
    assert parse_messages(rows, "messages") == rows


def test_flags_are_read_and_kept_from_the_template() -> None:
    rows = [ASK, {**SAY, "train": False}, ASK, {**SAY, "weight": 1}, ASK, {**SAY, "weight": 0.0}]
    found = make_conversation(rows, "messages")
    assert found.flags == [None, False, None, True, None, False]
    assert found.messages == [ASK, SAY] * 3


def test_schemas_of_tools_are_a_list_or_json() -> None:
    schema = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "default": None}}}
    plain = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    assert make_conversation([ASK, SAY], "messages", [schema]).tools == [plain]
    text = '[{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]'
    assert make_conversation([ASK, SAY], "messages", text).tools == [plain]
    for none in (None, [], "", " ", "[]", "null"):
        assert make_conversation([ASK, SAY], "messages", none).tools is None


def deep(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = {"a": value}
    return value


def call(function: object) -> list:
    return [ASK, {"role": "assistant", "tool_calls": [{"function": function}]}]


PATH = "messages[1].tool_calls[0].function"
BAD = [
    (None, "messages: want a list of messages, this is null"),
    ({}, "messages: want a list of messages, this is an object"),
    ([], "messages: the conversation is empty"),
    ("[{'role': 'user'}]", "messages: a string that holds no JSON: Expecting property name"),
    ('{"role": "user"}', "messages: want a list of messages, this is an object"),
    (" ", "messages: want a list of messages, this is a string"),
    (
        [{"role": "asistant", "content": "hi"}],
        "messages[0]: unknown role 'asistant'; did you mean 'assistant'? want one of system, developer, user, ",
    ),
    (["hi"], "messages[0]: want an object with role and content, this is a string"),
    ([{"role": "bot", "content": "hi"}], "messages[0]: unknown role 'bot'; want one of system, developer, user, "),
    ([{"content": "hi"}], "messages[0]: unknown role None"),
    ([{"role": ["user"], "content": "hi"}], "messages[0]: unknown role ['user']"),
    ([{"role": "x" * 999, "content": "hi"}], "messages[0]: unknown role 'xxxxxxxxxx"),
    ([ASK, {"role": "assistant"}], "messages[1]: content must be a string, this is null and there are no tool_calls"),
    ([ASK, {**SAY, "content": 3}], "messages[1]: content must be a string, this is a number"),
    ([{"role": "user", "content": None}], "messages[0]: content must be a string, this is null"),
    ([ASK, {**CALL, "content": {}}], "messages[1]: content must be a string, this is an object"),
    ([{"role": "user", "content": ["a"]}], "messages[0].content[0]: want an object with type and text, this is a str"),
    (
        [{"role": "user", "content": [{"type": "image_url"}]}],
        "messages[0].content[0]: parts of the type 'image_url' cannot be learnt: only 'text'",
    ),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text: want a string, this is null"),
    ([ASK, {**SAY, "name": 3}], "messages[1].name: want a string, this is a number"),
    ([ASK, {**SAY, "reasoning": ["a"]}], "messages[1].reasoning: want a string, this is a list"),
    ([ASK, {**SAY, "tool_calls": {"a": 1}}], "messages[1].tool_calls: want a list of calls, this is an object"),
    (
        [ASK, {**SAY, "tool_calls": ["a"]}],
        "messages[1].tool_calls[0]: want an object with a function, this is a st",
    ),
    (
        [{**ASK, "tool_calls": CALL["tool_calls"]}],
        "messages[0].tool_calls: only an assistant calls tools, not a mess",
    ),
    (call("add"), f"{PATH}: want an object with name and arguments, this is a string"),
    (call({"arguments": {}}), f"{PATH}.name: want the name of a tool, this is None"),
    (call({"name": "add", "arguments": "{"}), f"{PATH}.arguments: a string that holds no JSON: Expecting"),
    (call({"name": "add", "arguments": "3"}), f"{PATH}.arguments: want an object, this is a number in a string"),
    (call({"name": "add", "arguments": [1]}), f"{PATH}.arguments: want an object, this is a list"),
    (call({"name": "add", "arguments": '{"a": NaN}'}), f"{PATH}.arguments: a string that holds no JSON: NaN is no"),
    (call({"name": "add", "arguments": {"a": [1.0, float("nan")]}}), f"{PATH}.arguments.a[1]: nan is no number"),
    (call({"name": "add", "arguments": {"a": float("-inf")}}), f"{PATH}.arguments.a: -inf is no number of JSON"),
    (call({"name": "add", "arguments": {"a": b"b"}}), f"{PATH}.arguments.a: want a value of JSON, this is bytes"),
    (call({"name": "add", "arguments": deep(500)}), f"{PATH}.arguments.a.a.a.a.a"),
    (call({"name": "add", "arguments": '{"a":' * 99999}), f"{PATH}.arguments: "),
    ([ASK, {**SAY, "train": 1}], "messages[1].train: want true or false, this is a number"),
    ([ASK, {**SAY, "weight": 0.5}], "messages[1].weight: want 0 or 1, this is 0.5"),
    ([ASK, {**SAY, "weight": True}], "messages[1].weight: want 0 or 1, this is True"),
    (
        [ASK, {**SAY, "weight": 1, "train": False}],
        "messages[1]: train is false and weight is 1: which of them",
    ),
    ([{"role": "system", "content": "a"}] * 2, "messages[1]: a second system message; a conversation has one"),
    ([ASK, RESULT], "messages[1].tool_call_id: no call before has the id 'c1'"),
    ([ASK, {"role": "tool", "content": "3"}], "messages[1]: a tool's result without a call: it follows no assistant"),
    ([ASK, SAY, RESULT], "messages[2].tool_call_id: no call before has the id 'c1'"),
    ([ASK, CALL, {**RESULT, "tool_call_id": "c2"}], "messages[2].tool_call_id: no call before has the id 'c2'"),
    ([ASK, CALL, ASK, RESULT], "messages[3]: a tool's result without a call: it follows no assistant message"),
]


@pytest.mark.parametrize(("value", "message"), BAD)
def test_what_is_wrong_is_told_by_its_path(value: object, message: str) -> None:
    with pytest.raises(UserError) as told:
        parse_messages(value, "messages")
    assert str(told.value).startswith(message)
    assert "\n" not in str(told.value) and len(str(told.value)) < 500


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[", "tools: a string that holds no JSON: "),
        ("3", "tools: want a list of tool schemas (objects), this is a number"),
        ([{}, "add"], "tools[1]: want a tool's schema (an object), this is a string"),
        ([{"name": float("inf")}], "tools[0].name: inf is no number of JSON"),
    ],
)
def test_wrong_tools_are_told(value: object, message: str) -> None:
    with pytest.raises(UserError) as told:
        make_conversation([ASK, SAY], "messages", value)
    assert str(told.value).startswith(message)


def test_what_templates_may_want_is_left_to_them() -> None:
    for rows in (
        [SAY, ASK, ASK, SAY],
        [{"role": "developer", "content": "a"}, {"role": "system", "content": "b"}, ASK, SAY],
        [ASK, SAY, {"role": "tool", "content": "3"}],  # a call that is written into the content
        [ASK, CALL, RESULT, RESULT, SAY],
        [ASK, CALL],
    ):
        assert parse_messages(rows, "messages") == rows
