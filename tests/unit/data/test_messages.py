"""Messages of a row are normalized to what chat templates expect, and errors name the path in the row."""

from copy import deepcopy

import pytest

from tunekit.data.chat_template.messages import Message, make_conversation
from tunekit.errors import UserError

QUESTION = {"role": "user", "content": "What is 1 + 2?"}
ANSWER = {"role": "assistant", "content": "3"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "3"}


def parse_messages(value: object, column: str) -> list[Message]:
    return make_conversation(value, column).messages


def test_valid_messages_are_returned_unchanged() -> None:
    rows = [{"role": "system", "content": "Be brief."}, QUESTION, ANSWER]
    messages = parse_messages(rows, "messages")
    assert messages == rows and all(a is b for a, b in zip(messages, rows, strict=True)), "must not copy"


@pytest.mark.parametrize(
    "call",
    [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}},
        {"id": "c1", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}},
        {"id": "c1", "name": "add", "arguments": {"a": 1, "b": 2}},
        # as tables with typed columns return it
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2, "city": None}}},
    ],
)
def test_tool_calls_are_normalized(call: dict) -> None:
    rows = [QUESTION, {**CALL, "tool_calls": [call]}, RESULT]
    before = deepcopy(rows)
    assert parse_messages(rows, "messages") == [QUESTION, CALL, RESULT]
    assert rows == before, "a row is not changed"


def test_arguments_in_a_json_string_are_kept_exactly() -> None:
    call = {"function": {"name": "find", "arguments": '{"limit": null, "of": {"x": [1, null]}}'}}
    (_, message) = parse_messages([QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}], "messages")
    assert message["tool_calls"][0]["function"]["arguments"] == {"limit": None, "of": {"x": [1, None]}}
    call = {"function": {"name": "now", "arguments": ""}}
    (_, message) = parse_messages([QUESTION, {"role": "assistant", "tool_calls": [call]}], "messages")
    assert message == {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "now", "arguments": {}}}],
    }


def test_legacy_names_of_calls_and_results() -> None:
    rows = [
        QUESTION,
        {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "add", "content": "3"},
    ]
    assert parse_messages(rows, "messages") == [
        QUESTION,
        {**CALL, "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]},
        {"role": "tool", "name": "add", "content": "3"},
    ]


def test_null_columns_count_as_absent() -> None:
    nulls = dict.fromkeys(("name", "tool_calls", "tool_call_id", "reasoning_content", "function_call", "weight"))
    assert parse_messages([{**QUESTION, **nulls}, {**ANSWER, **nulls}], "messages") == [QUESTION, ANSWER]
    assert make_conversation([{**QUESTION, **nulls}, {**ANSWER, **nulls}], "messages").train_flags == {}
    empty = {**ANSWER, "tool_calls": []}
    assert parse_messages([QUESTION, empty], "messages") == [QUESTION, ANSWER]


def test_text_parts_of_content_are_joined() -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "1 + 2?", "image_url": None}]
    assert parse_messages([{"role": "user", "content": parts}, ANSWER], "messages") == [QUESTION, ANSWER]


def test_reasoning_content_is_kept() -> None:
    rows = [QUESTION, {**ANSWER, "reasoning_content": "One and two."}]
    assert parse_messages(rows, "messages") == rows


def test_train_flags_are_removed_from_messages() -> None:
    rows = [
        QUESTION,
        {**ANSWER, "train": False},
        QUESTION,
        {**ANSWER, "weight": 1},
        QUESTION,
        {**ANSWER, "weight": 0.0},
    ]
    conversation = make_conversation(rows, "messages")
    assert conversation.train_flags == {1: 0, 3: 1, 5: 0}
    assert conversation.messages == [QUESTION, ANSWER] * 3


def test_tool_schemas_are_a_list_or_json() -> None:
    schema = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "default": None}}}
    without_nulls = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    assert make_conversation([QUESTION, ANSWER], "messages", [schema]).tools == [without_nulls]
    text = '[{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]'
    assert make_conversation([QUESTION, ANSWER], "messages", text).tools == [without_nulls]
    for empty in (None, [], "", " ", "[]", "null"):
        assert make_conversation([QUESTION, ANSWER], "messages", empty).tools is None


def nested(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = {"a": value}
    return value


def call_messages(function: object) -> list:
    return [QUESTION, {"role": "assistant", "tool_calls": [{"function": function}]}]


PATH = "messages[1].tool_calls[0].function"
BAD_MESSAGES = [  # value, path, text of the message
    (None, "messages", "null"),
    ({}, "messages", "an object"),
    ([], "messages", "empty"),
    ("[{'role': 'user'}]", "messages", "Expecting property name"),
    ('{"role": "user"}', "messages", "an object"),
    (" ", "messages", "a string"),
    ([{"role": "asistant", "content": "hi"}], "messages[0]", "'assistant'"),
    (["hi"], "messages[0]", "a string"),
    ([{"role": "bot", "content": "hi"}], "messages[0]", "'bot'"),
    ([{"content": "hi"}], "messages[0]", "no `role`"),
    ([{"role": ["user"], "content": "hi"}], "messages[0]", "['user']"),
    ([{"role": "x" * 999, "content": "hi"}], "messages[0]", "'xxxxxxxxxx"),
    ([QUESTION, {"role": "assistant"}], "messages[1]", "tool_calls"),
    ([QUESTION, {**ANSWER, "content": 3}], "messages[1]", "a number"),
    ([{"role": "user", "content": None}], "messages[0]", "null"),
    ([QUESTION, {**CALL, "content": {}}], "messages[1]", "an object"),
    ([{"role": "user", "content": ["a"]}], "messages[0].content[0]", "a string"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]", "'image_url'"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "null"),
    ([QUESTION, {**ANSWER, "name": 3}], "messages[1].name", "a number"),
    ([QUESTION, {**ANSWER, "reasoning": ["a"]}], "messages[1].reasoning", "a list"),
    ([QUESTION, {**ANSWER, "tool_calls": {"a": 1}}], "messages[1].tool_calls", "an object"),
    ([QUESTION, {**ANSWER, "tool_calls": ["a"]}], "messages[1].tool_calls[0]", "a string"),
    ([{**QUESTION, "tool_calls": CALL["tool_calls"]}], "messages[0].tool_calls", "assistant"),
    (call_messages("add"), PATH, "a string"),
    (call_messages({"arguments": {}}), f"{PATH}.name", "null"),
    (call_messages({"name": "add", "arguments": "{"}), f"{PATH}.arguments", "Expecting"),
    (call_messages({"name": "add", "arguments": "3"}), f"{PATH}.arguments", "a number"),
    (call_messages({"name": "add", "arguments": [1]}), f"{PATH}.arguments", "a list"),
    (call_messages({"name": "add", "arguments": '{"a": NaN}'}), f"{PATH}.arguments", "NaN"),
    (call_messages({"name": "add", "arguments": {"a": [1.0, float("nan")]}}), f"{PATH}.arguments.a[1]", "nan"),
    (call_messages({"name": "add", "arguments": {"a": float("-inf")}}), f"{PATH}.arguments.a", "-inf"),
    (call_messages({"name": "add", "arguments": {"a": b"b"}}), f"{PATH}.arguments.a", "bytes"),
    (call_messages({"name": "add", "arguments": nested(500)}), f"{PATH}.arguments.a.a.a.a.a", ""),
    (call_messages({"name": "add", "arguments": '{"a":' * 99999}), f"{PATH}.arguments", ""),
    ([QUESTION, {**ANSWER, "train": 1}], "messages[1].train", "a number"),
    ([QUESTION, {**ANSWER, "weight": 1.5}], "messages[1].weight", "1.5"),
    ([QUESTION, {**ANSWER, "weight": 1e-46}], "messages[1].weight", "1e-46"),  # 0 in fp32
    ([QUESTION, {**ANSWER, "weight": float("nan")}], "messages[1].weight", "nan"),
    ([QUESTION, {**ANSWER, "weight": True}], "messages[1].weight", "True"),
    ([QUESTION, {**ANSWER, "weight": 1, "train": False}], "messages[1]", "weight"),
    ([{"role": "system", "content": "a"}] * 2, "messages[1]", "system"),
    ([QUESTION, RESULT], "messages[1].tool_call_id", "'c1'"),
    ([QUESTION, {"role": "tool", "content": "3"}], "messages[1]", "tool"),
    ([QUESTION, ANSWER, RESULT], "messages[2].tool_call_id", "'c1'"),
    ([QUESTION, CALL, {**RESULT, "tool_call_id": "c2"}], "messages[2].tool_call_id", "'c2'"),
    ([QUESTION, CALL, QUESTION, RESULT], "messages[3]", "tool"),
]


@pytest.mark.parametrize(("value", "path", "text"), BAD_MESSAGES)
def test_invalid_messages_are_rejected_with_their_path(value: object, path: str, text: str) -> None:
    with pytest.raises(UserError) as error:
        parse_messages(value, "messages")
    message = str(error.value)
    assert message.startswith(path) and text in message
    assert "\n" not in message and len(message) < 500


@pytest.mark.parametrize(
    ("value", "path", "text"),
    [
        ("[", "tools", "JSON"),
        ("3", "tools", "a number"),
        ([{}, "add"], "tools[1]", "a string"),
        ([{"name": float("inf")}], "tools[0].name", "inf"),
    ],
)
def test_invalid_tools_are_rejected_with_their_path(value: object, path: str, text: str) -> None:
    with pytest.raises(UserError) as error:
        make_conversation([QUESTION, ANSWER], "messages", value)
    message = str(error.value)
    assert message.startswith(f"{path}:") and text in message


def test_order_of_roles_is_left_to_the_template() -> None:
    for rows in (
        [ANSWER, QUESTION, QUESTION, ANSWER],
        [{"role": "developer", "content": "a"}, {"role": "system", "content": "b"}, QUESTION, ANSWER],
        [QUESTION, ANSWER, {"role": "tool", "content": "3"}],  # the content contains the call
        [QUESTION, CALL, RESULT, RESULT, ANSWER],
        [QUESTION, CALL],
    ):
        assert parse_messages(rows, "messages") == rows
