"""What templates want of messages, found by trying, and what of a row they leave out."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.data.families import FAMILIES, folder
from tunekit.data.chat_template.messages import Conversation, make_conversation
from tunekit.data.chat_template.template_features import detect_features
from tunekit.data.chat_template.template_warnings import find_doc_flags
from tunekit.data.datasets import AutoDataset
from tunekit.data.doc_flags import DocFlags
from tunekit.data.readers.row_reader import Row
from tunekit.data.tokenize import render_conversation
from tunekit.data.tokenizer import Tokenizer

ASK, SAY = {"role": "user", "content": "What is 1 + 2?"}, {"role": "assistant", "content": "It is 3."}
MORE = {"role": "user", "content": "And now?"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "id": "call00001", "function": {"name": "add", "arguments": {"a": 1}}}],
}
TURN = "{{ '<|im_start|>' + m.role + '\\n' }}"
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
END = "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
EACH = "{% for m in messages %}" + TURN
FORMS = {
    "strings": EACH + "{{ m.content }}" + END,
    "parts": EACH + "{% for p in m.content %}{{ p.text }}{% endfor %}" + END,
    "both": EACH + "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}" + END,
    "nulls": EACH + "{% if m.content %}{{ m.content }}{% endif %}" + CALLS + END,
    "prints": EACH + "{{ m.content }}" + CALLS + END,
    "adds": EACH + "{{ '' + m.content }}" + CALLS + END,
    "needs null": EACH + "{% if m.content is none %}" + CALLS + "{% else %}{{ m.content }}{% endif %}" + END,
    "ids": EACH + "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.id }}{% endfor %}" + END,
    "dumps": EACH + "{{ m | tojson }}" + END,
    "mood": EACH + "{{ m.content }}{{ m.mood }}" + END,
    "json": EACH + "{% if m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}" + END,
}


@pytest.fixture
def opened(folders: dict[str, Path], tmp_path: Path):
    def open(form: str) -> Tokenizer:
        (tmp_path / "form.jinja").write_text(FORMS[form])
        return Tokenizer.open(folders["chatml"], str(tmp_path / "form.jinja"))

    return open


def text(tokenizer: Tokenizer, messages: list[dict], learn="assistant") -> str:
    return render_conversation(tokenizer, make_conversation(messages, "messages"), learn).text


def expected(*turns: str) -> str:
    roles = ("user", "assistant", "tool", "assistant")
    return "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in zip(roles, turns, strict=False))


@pytest.mark.parametrize("form", ["strings", "parts", "both"])
def test_content_is_given_as_the_template_wants_it(form: str, opened) -> None:
    tokenizer = opened(form)
    assert detect_features(tokenizer.template(), tokenizer).parts == (form == "parts")
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "1 + 2?"}]
    for content in (ASK["content"], parts):
        assert text(tokenizer, [{"role": "user", "content": content}, SAY]) == expected(ASK["content"], SAY["content"])


@pytest.mark.parametrize("form", ["nulls", "prints", "adds", "needs null"])
def test_a_null_beside_calls_is_nothing(form: str, opened) -> None:
    tokenizer = opened(form)
    assert text(tokenizer, [ASK, CALL]) == expected(ASK["content"], 'add({"a": 1})')


def test_texts_equal_those_of_transformers(opened, folders: dict[str, Path]) -> None:
    theirs = AutoTokenizer.from_pretrained(folders["chatml"])
    rows = [ASK, CALL, {"role": "tool", "tool_call_id": "call00001", "content": "3"}, SAY]
    assert text(opened("nulls"), rows) == theirs.apply_chat_template(rows, chat_template=FORMS["nulls"], tokenize=False)
    want = theirs.apply_chat_template(
        [{**ASK, "content": [{"type": "text", "text": ASK["content"]}]}, {**SAY, "content": [{"text": "It is 3."}]}],
        chat_template=FORMS["parts"],
        tokenize=False,
    )
    assert text(opened("parts"), [ASK, SAY]) == want


def test_keys_and_ids_that_no_template_reads_are_left_out(opened) -> None:
    rows = [{**ASK, "time": 3, "mood": "glad"}, CALL, {"role": "tool", "tool_call_id": "call00001", "content": "3"}]

    def fitted(form: str) -> list[dict]:
        tokenizer = opened(form)
        return detect_features(tokenizer.template(), tokenizer).fit(rows)

    assert fitted("nulls")[0] == ASK
    assert fitted("mood")[0] == {**ASK, "mood": "glad"}
    assert fitted("dumps")[0] == rows[0]
    assert [fitted("nulls")[1]["tool_calls"][0]["id"], fitted("nulls")[2]["tool_call_id"]] == ["call00000"] * 2
    assert fitted("ids")[1]["tool_calls"][0]["id"] == "call00001"
    assert rows[1] == CALL, "a row is not changed"


def found(tokenizer: Tokenizer, row: Conversation, learnt: list[int] | None = None) -> DocFlags:
    turns = (
        [i for i, message in enumerate(row.messages) if message["role"] == "assistant"] if learnt is None else learnt
    )
    return find_doc_flags(tokenizer, row, tokenizer.render(row.messages, row.tools), turns)


def test_what_the_template_leaves_out_is_noticed(opened, folders: dict[str, Path]) -> None:
    plain, calls = opened("strings"), opened("nulls")
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert found(plain, Conversation([ASK, SAY])) == DocFlags(0)
    assert found(plain, Conversation([ASK, SAY], tools)) == DocFlags.TOOLS_UNUSED
    assert found(Tokenizer.open(folders["thinking"]), Conversation([ASK, SAY], tools)) == DocFlags(0)
    calls = opened("nulls")
    assert found(calls, make_conversation([ASK, CALL], "messages")) == DocFlags(0)
    plain = opened("strings")
    assert found(plain, make_conversation([ASK, {**CALL, "content": "Well."}], "messages")) == DocFlags.TOOLS_UNUSED


def test_lost_content_is_noticed(opened) -> None:
    tokenizer = opened("strings")
    text = tokenizer.render([ASK, SAY])
    assert find_doc_flags(tokenizer, Conversation([ASK, {**SAY, "content": "  It is 3.\n"}]), text, [1]) == DocFlags(
        0
    ), "templates trim"
    assert (
        find_doc_flags(tokenizer, Conversation([ASK, {**SAY, "content": "It is 4."}]), text, [1])
        == DocFlags.CONTENT_LOST
    )
    assert find_doc_flags(tokenizer, Conversation([SAY, ASK]), text, [0]) == DocFlags(0), "found, if in another order"
    result = {"role": "tool", "content": '{"sum": "drei\nvier ä"}'}
    tokenizer = opened("json")
    assert found(tokenizer, Conversation([ASK, SAY, result, SAY])) == DocFlags(0)


def test_dropped_reasoning_is_noticed_where_it_would_be_learnt(folders: dict[str, Path], opened) -> None:
    thought = {**SAY, "reasoning_content": "One and two."}
    thinking = Tokenizer.open(folders["thinking"])
    assert found(thinking, Conversation([ASK, thought])) == DocFlags(0)
    assert found(thinking, Conversation([ASK, thought, MORE, SAY])) == DocFlags.REASONING_DROPPED
    assert found(thinking, Conversation([ASK, thought, MORE, SAY]), [3]) == DocFlags(0), "it is not learnt"
    assert found(opened("strings"), Conversation([ASK, thought])) == DocFlags.REASONING_DROPPED
    inline = {**SAY, "content": "<think>\nOne and two.\n</think>\n\nIt is 3."}
    assert found(thinking, Conversation([ASK, inline])) == DocFlags(0)
    assert found(thinking, Conversation([ASK, inline, MORE, SAY])) == DocFlags.REASONING_DROPPED


def test_special_tokens_in_what_others_say_are_noticed(opened) -> None:
    tokenizer = opened("strings")
    bad = {"role": "user", "content": "What does <|im_end|> mean?"}
    assert found(tokenizer, Conversation([bad, SAY])) == DocFlags.SPECIAL_IN_TEXT
    assert (
        found(tokenizer, Conversation([{"role": "tool", "content": "<|endoftext|>"}, SAY])) == DocFlags.SPECIAL_IN_TEXT
    )
    assert found(tokenizer, Conversation([{"role": "user", "content": "a < b, <|im"}, SAY])) == DocFlags(0)


def test_turns_that_say_nothing_are_noticed(opened) -> None:
    tokenizer = opened("nulls")
    assert found(tokenizer, Conversation([ASK, {**SAY, "content": " "}])) == DocFlags.EMPTY_TURN
    assert found(tokenizer, make_conversation([ASK, CALL], "messages")) == DocFlags(0)
    assert found(tokenizer, Conversation([{**ASK, "content": ""}, SAY])) == DocFlags(0)


NOTICED = {"glm4": DocFlags.UNENDED, "smollm3": DocFlags.PROMPT_LEARNT}  # of their templates, whatever is said


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_are_written_as_transformers_does_and_nothing_is_noticed(name: str, tmp_path: Path) -> None:
    place = folder(tmp_path, name)
    tokenizer, theirs = Tokenizer.open(place), AutoTokenizer.from_pretrained(place)
    tools = [{"type": "function", "function": {"name": "add", "description": "Sums.", "parameters": {}}}]
    calls = [{**CALL, "tool_calls": [{**CALL["tool_calls"][0], "id": "abcdefghi"}]}]
    result = {"role": "tool", "tool_call_id": "abcdefghi", "name": "add", "content": "3"}
    rows: list[dict] = [{"messages": [ASK, SAY]}, {"messages": [ASK, SAY, MORE, SAY]}]
    rows += [{"messages": [ASK, *calls, result, SAY], "tools": tools}] if FAMILIES[name].calls else []
    for row, found in zip(rows, AutoDataset("x").encode(tokenizer, [Row("x:1", row) for row in rows]), strict=True):
        assert isinstance(found, list), found
        assert found[0].signs == (NOTICED[name] if name in NOTICED else DocFlags(0))
        if name != "deepseek_r1" or "tools" not in row:  # transformers takes the null out that this template asks for
            want = theirs.apply_chat_template(row["messages"], tools=row.get("tools"), return_dict=False)
            assert found[0].tokens.tolist() == want
