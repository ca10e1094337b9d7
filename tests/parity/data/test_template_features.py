"""Template features are detected by rendering probes, and content that a template drops sets a flag."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.helpers.chat_families import FAMILIES, write_family
from tunekit.data.chat_template.messages import Conversation, make_conversation
from tunekit.data.chat_template.template_features import detect_features
from tunekit.data.chat_template.template_warnings import find_doc_flags
from tunekit.data.document import DocFlags
from tunekit.data.readers.row_reader import Row
from tunekit.data.sft_datasets import AutoDataset
from tunekit.data.tokenize import render_conversation
from tunekit.data.tokenizer import Tokenizer

QUESTION, ANSWER = {"role": "user", "content": "What is 1 + 2?"}, {"role": "assistant", "content": "It is 3."}
FOLLOW_UP = {"role": "user", "content": "And now?"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "id": "call00001", "function": {"name": "add", "arguments": {"a": 1}}}],
}
TURN = "{{ '<|im_start|>' + m.role + '\\n' }}"
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
END = "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
FOR_EACH = "{% for m in messages %}" + TURN
FORMS = {
    "strings": FOR_EACH + "{{ m.content }}" + END,
    "parts": FOR_EACH + "{% for p in m.content %}{{ p.text }}{% endfor %}" + END,
    "both": FOR_EACH + "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}" + END,
    "nulls": FOR_EACH + "{% if m.content %}{{ m.content }}{% endif %}" + CALLS + END,
    "prints": FOR_EACH + "{{ m.content }}" + CALLS + END,
    "adds": FOR_EACH + "{{ '' + m.content }}" + CALLS + END,
    "needs null": FOR_EACH + "{% if m.content is none %}" + CALLS + "{% else %}{{ m.content }}{% endif %}" + END,
    "ids": FOR_EACH + "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.id }}{% endfor %}" + END,
    "dumps": FOR_EACH + "{{ m | tojson }}" + END,
    "mood": FOR_EACH + "{{ m.content }}{{ m.mood }}" + END,
    "text arguments": FOR_EACH + CALLS.replace(" | tojson", "") + END,  # prints objects as Python does
    "json": FOR_EACH + "{% if m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}" + END,
}


@pytest.fixture
def open_form(tokenizer_dirs: dict[str, Path], tmp_path: Path):
    def open(form: str) -> Tokenizer:
        (tmp_path / "form.jinja").write_text(FORMS[form])
        return Tokenizer.open(tokenizer_dirs["chatml"]).with_template(str(tmp_path / "form.jinja"))

    return open


def rendered_text(tokenizer: Tokenizer, messages: list[dict], train_on="assistant") -> str:
    return render_conversation(tokenizer, make_conversation(messages, "messages"), train_on).text


def expected_text(*turns: str) -> str:
    roles = ("user", "assistant", "tool", "assistant")
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in zip(roles, turns, strict=False))


@pytest.mark.parametrize("form", ["strings", "parts", "both"])
def test_content_is_a_string_or_parts_as_the_template_needs(form: str, open_form) -> None:
    tokenizer = open_form(form)
    assert detect_features(tokenizer.template(), tokenizer).content_parts == (form == "parts")
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "1 + 2?"}]
    for content in (QUESTION["content"], parts):
        assert rendered_text(tokenizer, [{"role": "user", "content": content}, ANSWER]) == expected_text(
            QUESTION["content"], ANSWER["content"]
        )


@pytest.mark.parametrize("form", ["nulls", "prints", "adds", "needs null"])
def test_null_content_of_tool_calls_is_empty(form: str, open_form) -> None:
    tokenizer = open_form(form)
    assert rendered_text(tokenizer, [QUESTION, CALL]) == expected_text(QUESTION["content"], 'add({"a": 1})')


@pytest.mark.parametrize(
    ("form", "is_text"), [("text arguments", True), ("nulls", False), ("dumps", False), ("strings", False)]
)
def test_arguments_are_texts_if_the_template_needs_texts(form: str, is_text: bool, open_form) -> None:
    tokenizer = open_form(form)
    assert detect_features(tokenizer.template(), tokenizer).text_arguments == is_text
    if "arguments" in FORMS[form]:
        assert 'add({"a": 1})' in rendered_text(tokenizer, [QUESTION, CALL])


def test_text_equals_transformers(open_form, tokenizer_dirs: dict[str, Path]) -> None:
    theirs = AutoTokenizer.from_pretrained(tokenizer_dirs["chatml"])
    rows = [QUESTION, CALL, {"role": "tool", "tool_call_id": "call00001", "content": "3"}, ANSWER]
    assert rendered_text(open_form("nulls"), rows) == theirs.apply_chat_template(
        rows, chat_template=FORMS["nulls"], tokenize=False
    )
    expected = theirs.apply_chat_template(
        [
            {**QUESTION, "content": [{"type": "text", "text": QUESTION["content"]}]},
            {**ANSWER, "content": [{"text": "It is 3."}]},
        ],
        chat_template=FORMS["parts"],
        tokenize=False,
    )
    assert rendered_text(open_form("parts"), [QUESTION, ANSWER]) == expected


def test_keys_and_ids_that_the_template_ignores_are_dropped(open_form) -> None:
    rows = [
        {**QUESTION, "time": 3, "mood": "glad"},
        CALL,
        {"role": "tool", "tool_call_id": "call00001", "content": "3"},
    ]

    def fitted(form: str) -> list[dict]:
        tokenizer = open_form(form)
        return detect_features(tokenizer.template(), tokenizer).adapt_messages(rows)

    assert fitted("nulls")[0] == QUESTION
    assert fitted("mood")[0] == {**QUESTION, "mood": "glad"}
    assert fitted("dumps")[0] == rows[0]
    assert [fitted("nulls")[1]["tool_calls"][0]["id"], fitted("nulls")[2]["tool_call_id"]] == ["call00000"] * 2
    assert fitted("ids")[1]["tool_calls"][0]["id"] == "call00001"
    assert rows[1] == CALL, "a row is not changed"


def doc_flags(tokenizer: Tokenizer, row: Conversation, targets: list[int] | None = None) -> DocFlags:
    turns = (
        [i for i, message in enumerate(row.messages) if message["role"] == "assistant"] if targets is None else targets
    )
    return find_doc_flags(tokenizer, row, tokenizer.render(row.messages, row.tools), turns)


def test_unused_tools_set_a_flag(open_form, tokenizer_dirs: dict[str, Path]) -> None:
    without_calls, with_calls = open_form("strings"), open_form("nulls")
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert doc_flags(without_calls, Conversation([QUESTION, ANSWER])) == DocFlags(0)
    assert doc_flags(without_calls, Conversation([QUESTION, ANSWER], tools)) == DocFlags.TOOLS_NOT_RENDERED
    assert doc_flags(Tokenizer.open(tokenizer_dirs["thinking"]), Conversation([QUESTION, ANSWER], tools)) == DocFlags(0)
    with_calls = open_form("nulls")
    assert doc_flags(with_calls, make_conversation([QUESTION, CALL], "messages")) == DocFlags(0)
    without_calls = open_form("strings")
    assert (
        doc_flags(without_calls, make_conversation([QUESTION, {**CALL, "content": "Well."}], "messages"))
        == DocFlags.TOOLS_NOT_RENDERED
    )


def test_lost_content_sets_a_flag(open_form) -> None:
    tokenizer = open_form("strings")
    text = tokenizer.render([QUESTION, ANSWER])
    trimmed = find_doc_flags(tokenizer, Conversation([QUESTION, {**ANSWER, "content": "  It is 3.\n"}]), text, [1])
    assert trimmed == DocFlags(0), "templates strip contents"
    assert (
        find_doc_flags(tokenizer, Conversation([QUESTION, {**ANSWER, "content": "It is 4."}]), text, [1])
        == DocFlags.CONTENT_LOST
    )
    assert find_doc_flags(tokenizer, Conversation([ANSWER, QUESTION]), text, [0]) == DocFlags(0), "in another order"
    result = {"role": "tool", "content": '{"sum": "drei\nvier ä"}'}
    tokenizer = open_form("json")
    assert doc_flags(tokenizer, Conversation([QUESTION, ANSWER, result, ANSWER])) == DocFlags(0)


def test_dropped_reasoning_of_targets_sets_a_flag(tokenizer_dirs: dict[str, Path], open_form) -> None:
    thought = {**ANSWER, "reasoning_content": "One and two."}
    thinking = Tokenizer.open(tokenizer_dirs["thinking"])
    assert doc_flags(thinking, Conversation([QUESTION, thought])) == DocFlags(0)
    assert doc_flags(thinking, Conversation([QUESTION, thought, FOLLOW_UP, ANSWER])) == DocFlags.REASONING_DROPPED
    assert doc_flags(thinking, Conversation([QUESTION, thought, FOLLOW_UP, ANSWER]), [3]) == DocFlags(0), "no target"
    assert doc_flags(open_form("strings"), Conversation([QUESTION, thought])) == DocFlags.REASONING_DROPPED
    inline = {**ANSWER, "content": "<think>\nOne and two.\n</think>\n\nIt is 3."}
    assert doc_flags(thinking, Conversation([QUESTION, inline])) == DocFlags(0)
    assert doc_flags(thinking, Conversation([QUESTION, inline, FOLLOW_UP, ANSWER])) == DocFlags.REASONING_DROPPED


def test_special_tokens_in_other_messages_set_a_flag(open_form) -> None:
    tokenizer = open_form("strings")
    question = {"role": "user", "content": "What does <|im_end|> mean?"}
    assert doc_flags(tokenizer, Conversation([question, ANSWER])) == DocFlags.SPECIAL_IN_TEXT
    assert (
        doc_flags(tokenizer, Conversation([{"role": "tool", "content": "<|endoftext|>"}, ANSWER]))
        == DocFlags.SPECIAL_IN_TEXT
    )
    assert doc_flags(tokenizer, Conversation([{"role": "user", "content": "a < b, <|im"}, ANSWER])) == DocFlags(0)


def test_empty_answers_set_a_flag(open_form) -> None:
    tokenizer = open_form("nulls")
    assert doc_flags(tokenizer, Conversation([QUESTION, {**ANSWER, "content": " "}])) == DocFlags.EMPTY_TURN
    assert doc_flags(tokenizer, make_conversation([QUESTION, CALL], "messages")) == DocFlags(0)
    assert doc_flags(tokenizer, Conversation([{**QUESTION, "content": ""}, ANSWER])) == DocFlags(0)


FLAGS_OF_TEMPLATE = {"glm4": DocFlags.MISSING_END_TOKEN, "smollm3": DocFlags.PROMPT_TRAINED}  # with any messages


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_equal_transformers_without_flags(name: str, tmp_path: Path) -> None:
    directory = write_family(tmp_path, name)
    tokenizer, theirs = Tokenizer.open(directory), AutoTokenizer.from_pretrained(directory)
    tools = [{"type": "function", "function": {"name": "add", "description": "Sums.", "parameters": {}}}]
    calls = [{**CALL, "tool_calls": [{**CALL["tool_calls"][0], "id": "abcdefghi"}]}]
    result = {"role": "tool", "tool_call_id": "abcdefghi", "name": "add", "content": "3"}
    rows: list[dict] = [{"messages": [QUESTION, ANSWER]}, {"messages": [QUESTION, ANSWER, FOLLOW_UP, ANSWER]}]
    rows += [{"messages": [QUESTION, *calls, result, ANSWER], "tools": tools}] if FAMILIES[name].calls else []
    for row, documents in zip(
        rows, AutoDataset("x").encode_rows(tokenizer, [Row("x:1", row) for row in rows]), strict=True
    ):
        assert isinstance(documents, list), documents
        assert documents[0].doc_flags == (FLAGS_OF_TEMPLATE[name] if name in FLAGS_OF_TEMPLATE else DocFlags(0))
        if name != "deepseek_r1" or "tools" not in row:  # transformers removes the null that this template needs
            expected = theirs.apply_chat_template(row["messages"], tools=row.get("tools"), return_dict=False)
            assert documents[0].tokens.tolist() == expected
