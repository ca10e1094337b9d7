"""The choices of `data:` from a row to documents: what is learnt of each format, and why a row is refused."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tunekit.data.chat_template.turn_boundaries import NUMBER
from tunekit.data.datasets import (
    AutoDataset,
    ChatDataset,
    CompletionDataset,
    DatasetConfig,
    InstructDataset,
    PreferenceDataset,
    ShareGPTDataset,
    TextDataset,
    UnpairedPreferenceDataset,
)
from tunekit.data.doc_flags import DocFlags
from tunekit.data.readers.row_reader import BadRow, Row
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import FieldError, UserError

TALK = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "Thanks."},
    {"role": "assistant", "content": "Hello there 😀"},
]
ASK, SAY = TALK[:2]
BOTH = "It is 4.<|im_end|>Hello there 😀<|im_end|>"
# Writes calls as JSON and schemas before everything.
TOOLS = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.content %}{{ m.content }}{% endif %}
    {%- for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"name": "add", "arguments": {"a": 2, "b": 2}}


@pytest.fixture
def tokenizer(folders: dict[str, Path]) -> Tokenizer:
    return Tokenizer.open(folders["chatml"])


@pytest.fixture
def tools(folders: dict[str, Path], tmp_path: Path) -> Tokenizer:
    (tmp_path / "tools.jinja").write_text(TOOLS)
    return Tokenizer.open(folders["chatml"], str(tmp_path / "tools.jinja"))


def documents(rows: DatasetConfig, tokenizer: Tokenizer, *fields: dict) -> Iterator:
    """Documents of rows, all in one call."""
    tokenizer = rows.prepare(tokenizer)
    for found in rows.encode(tokenizer, [Row(f"rows.jsonl:{n}", row) for n, row in enumerate(fields, 1)]):
        assert isinstance(found, list), found
        for document in found:
            assert document.tokens.dtype == "int32" and document.learnt.dtype == bool
            yield document


def taught(rows: DatasetConfig, tokenizer: Tokenizer, *fields: dict) -> list[str]:
    """What each document teaches, as text: a first token is never a target."""
    return [
        tokenizer.decode(document.tokens[1:][document.learnt[1:]].tolist(), special=True)
        for document in documents(rows, tokenizer, *fields)
    ]


def whole(rows: DatasetConfig, tokenizer: Tokenizer, *fields: dict) -> list[str]:
    return [
        tokenizer.decode(document.tokens.tolist(), special=True) for document in documents(rows, tokenizer, *fields)
    ]


def fault(rows: DatasetConfig, tokenizer: Tokenizer, fields: dict) -> str:
    (found,) = rows.encode(rows.prepare(tokenizer), [Row("rows.jsonl:7", fields)])
    assert isinstance(found, BadRow) and found.where == "rows.jsonl:7", found
    return found.reason


def test_chat_teaches_what_the_assistant_says(tokenizer: Tokenizer) -> None:
    rows = {"messages": TALK, "tools": None}, {"messages": TALK[:2], "tools": []}
    assert taught(ChatDataset("x"), tokenizer, *rows) == [BOTH, "It is 4.<|im_end|>"]
    assert whole(ChatDataset("x"), tokenizer, *rows) == [tokenizer.render(TALK), tokenizer.render(TALK[:2])]
    assert taught(ChatDataset("x", train_on="last"), tokenizer, rows[0]) == ["Hello there 😀<|im_end|>"]
    everything = tokenizer.render(TALK).removeprefix("<|im_start|>")
    assert taught(ChatDataset("x", train_on="all"), tokenizer, rows[0]) == [everything]
    assert taught(ChatDataset("x", train_on="all"), tokenizer, {"messages": TALK[:1]}) == [
        "user\nWhat is 2 + 2?<|im_end|>\n"
    ]


def test_messages_may_stand_in_a_cell_as_json(tokenizer: Tokenizer) -> None:
    said = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    rows = {
        ChatDataset("x"): {"messages": TALK},
        ShareGPTDataset("x"): {"conversations": said},
        CompletionDataset("x"): {"prompt": [ASK], "completion": [SAY]},
        PreferenceDataset("x"): {"prompt": [ASK], "chosen": [SAY], "rejected": [{**SAY, "content": "It is 5."}]},
    }
    for choice, row in rows.items():
        cells = {name: f" {json.dumps(value)}" for name, value in row.items()}
        assert taught(choice, tokenizer, cells) == taught(choice, tokenizer, row)
    for row in ({"messages": TALK}, {"messages": said}):
        assert taught(AutoDataset("x"), tokenizer, {"messages": json.dumps(row["messages"])}) == taught(
            AutoDataset("x"), tokenizer, row
        )
    for text in ('[{"a": 1}]', '[{"role": "user"', "[1]", "[]"):  # texts to learn
        assert taught(CompletionDataset("x"), tokenizer, {"prompt": "say: ", "completion": text}) == [
            f"{text}<|im_end|>"
        ]


def test_roles_may_be_named(tokenizer: Tokenizer) -> None:
    talk = [{"role": "system", "content": "Be kind."}, *TALK]
    users = "What is 2 + 2?<|im_end|>Thanks.<|im_end|>"
    assert taught(ChatDataset("x", train_on=("user",)), tokenizer, {"messages": talk}) == [users]
    both = "Be kind.<|im_end|>" + BOTH
    assert taught(ChatDataset("x", train_on=("system", "assistant")), tokenizer, {"messages": talk}) == [both]
    assert fault(ChatDataset("x", train_on=("tool",)), tokenizer, {"messages": talk}) == (
        "nothing to learn: the conversation has no tool message"
    )


def flagged(*flags: object, key: str = "train") -> dict:
    """The conversation with a flag at each message that has one."""
    return {"messages": [m if f is None else {**m, key: f} for m, f in zip(TALK, flags, strict=True)]}


def test_messages_may_say_for_themselves(tokenizer: Tokenizer) -> None:
    rows = ChatDataset("x", train_on="per_message")
    cases = {
        (None, True, None, None): "It is 4.<|im_end|>",
        (None, False, None, None): "Hello there 😀<|im_end|>",
        (False, False, False, True): "Hello there 😀<|im_end|>",
        (True, True, None, None): "What is 2 + 2?<|im_end|>It is 4.<|im_end|>",
        (None, None, None, None): BOTH,
    }
    assert [taught(rows, tokenizer, flagged(*flags)) for flags in cases] == [[text] for text in cases.values()]
    assert taught(rows, tokenizer, flagged(None, 0, None, 1, key="weight")) == ["Hello there 😀<|im_end|>"]
    assert fault(rows, tokenizer, flagged(None, False, None, False)) == (
        "nothing to learn: the conversation has no message that is marked"
    )


@pytest.mark.parametrize("answers", [{}, {"train": True}], ids=["unmarked", "marked"])
def test_marks_in_a_prompt_say_nothing(answers: dict, tokenizer: Tokenizer) -> None:
    """It may hold answers that are marked; of none a token is learnt."""
    prompt = [ASK, {**SAY, "train": True}, ASK]
    yes, no = ({"role": "assistant", "content": text, **answers} for text in ("Yes.", "No."))
    ends = ["Yes.<|im_end|>", "No.<|im_end|>"]
    for row in (
        {"prompt": prompt, "chosen": [yes], "rejected": [no]},
        {"chosen": [*prompt, yes], "rejected": [*prompt, no]},
    ):
        assert taught(PreferenceDataset("x", train_on="per_message"), tokenizer, row) == ends
        assert taught(PreferenceDataset("x"), tokenizer, row) == ends
    single = {"prompt": prompt, "completion": [yes]}
    assert taught(CompletionDataset("x", train_on="per_message"), tokenizer, single) == ends[:1]
    assert (
        taught(UnpairedPreferenceDataset("x", train_on="per_message"), tokenizer, {**single, "label": True}) == ends[:1]
    )


def test_flags_are_not_passed_over(tokenizer: Tokenizer) -> None:
    assert fault(ChatDataset("x"), tokenizer, flagged(None, False, None, True)) == (
        "messages[1]: is marked not to be learnt, against `train_on: assistant`; set `train_on: per_message`"
    )
    assert fault(ChatDataset("x"), tokenizer, flagged(True, True, None, None)) == (
        "messages[0]: is marked to be learnt, against `train_on: assistant`; set `train_on: per_message`"
    )
    assert "against `train_on: [user]`" in fault(
        ChatDataset("x", train_on=("user",)), tokenizer, flagged(False, None, None, None)
    )
    assert "against `train_on: all`" in fault(
        ChatDataset("x", train_on="all"), tokenizer, flagged(False, None, None, None)
    )
    assert taught(ChatDataset("x"), tokenizer, flagged(False, True, False, True)) == [BOTH], "they agree"
    assert taught(ChatDataset("x", train_on="last"), tokenizer, flagged(None, True, None, True)) == [
        "Hello there 😀<|im_end|>"
    ]


def test_calls_are_learnt_and_their_results_are_not(tools: Tokenizer) -> None:
    asked = {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": CALL}]}
    talk = [ASK, asked, {"role": "tool", "tool_call_id": "a", "content": "4"}, SAY]
    (found,) = documents(AutoDataset("x"), tools, {"messages": talk, "tools": [SCHEMA]})
    written = tools.decode(found.tokens.tolist(), special=True)
    assert written == (
        f"<|im_start|>system\n{json.dumps(SCHEMA)}<|im_end|>\n<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n"
        f"<|im_start|>assistant\n{json.dumps(CALL)}<|im_end|>\n<|im_start|>tool\n4<|im_end|>\n"
        "<|im_start|>assistant\nIt is 4.<|im_end|>\n"
    )
    learnt = f"{json.dumps(CALL)}<|im_end|>It is 4.<|im_end|>"
    assert tools.decode(found.tokens[found.learnt].tolist(), special=True) == learnt
    assert found.signs == DocFlags(0)


NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.integers(0, 9999).map(NUMBER.__add__)


@given(st.lists(NUMBERS, min_size=1, max_size=4), st.text("ab", min_size=1))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_numbers_and_ids_of_calls_make_no_other_shape(tools: Tokenizer, numbers: list, name: str) -> None:
    tools.shapes.clear()
    for row in (numbers, [0.5 for _ in numbers]):
        call = {"name": "add", "arguments": {"of": row, "first": row[0], "yes": True}}
        asked = {"role": "assistant", "content": None, "tool_calls": [{"id": f"{name}{row[0]}", "function": call}]}
        result = {"role": "tool", "tool_call_id": f"{name}{row[0]}", "content": json.dumps(row)}
        talk = [ASK, asked, result, {"role": "assistant", "content": str(row[0])}]
        assert taught(ChatDataset("x"), tools, {"messages": talk}) == [
            f"{json.dumps(call)}<|im_end|>{row[0]}<|im_end|>"
        ]
    assert len(tools.shapes) == 1, "what was found for one row holds for all"


def test_sharegpt_is_the_same_conversation(tools: Tokenizer) -> None:
    rows = {
        "conversations": [
            {"from": "human", "value": ASK["content"]},
            {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": "4"},
            {"from": "gpt", "value": SAY["content"]},
        ],
        "system": "Be kind.",
        "tools": json.dumps([SCHEMA["function"]]),
    }
    talk = [
        {"role": "system", "content": "Be kind."},
        ASK,
        {"role": "assistant", "tool_calls": [{"function": CALL}]},
        {"role": "tool", "content": "4"},
        SAY,
    ]
    want = {"messages": talk, "tools": [SCHEMA]}
    assert (
        whole(ShareGPTDataset("x"), tools, rows)
        == whole(AutoDataset("x"), tools, rows)
        == whole(ChatDataset("x"), tools, want)
    )
    assert taught(ShareGPTDataset("x"), tools, rows) == taught(ChatDataset("x"), tools, want)
    assert whole(AutoDataset("x"), tools, {"conversations": TALK}) == [tools.render(TALK)], "roles under another column"
    marked = [*rows["conversations"][:3], {**rows["conversations"][3], "weight": 0}]
    assert taught(ShareGPTDataset("x", train_on="per_message"), tools, {"conversations": marked}) == [
        f"{json.dumps(CALL)}<|im_end|>"
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"conversations": [{"from": "humn", "value": "a"}]},
            "conversations[0]: unknown speaker 'humn' in `from`; did you mean 'human'? want one of human",
        ),
        ({"conversations": [{"from": "bot", "value": "a"}]}, "conversations[0]: unknown speaker 'bot' in `from`; want"),
        ({"conversations": [{"from": "human", "value": 3}]}, "conversations[0].value: want a string, this is a number"),
        ({"conversations": [3]}, "conversations[0]: want an object with from and value, this is a number"),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "{"}]},
            "conversations[1].value: a string that holds no JSON: ",
        ),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "[{}]"}]},
            "conversations[1].value.name: want the name of a tool, this is None",
        ),
        (
            {"conversations": [{"from": "system", "value": "a"}], "system": "b"},
            "conversations[0]: a system message",
        ),
        ({"conversations": [{"from": "human", "value": "a"}], "system": 3}, "system: want a string, this is a number"),
        ({"conversations": []}, "conversations: the conversation is empty"),
    ],
)
def test_wrong_sharegpt_is_told(fields: dict, message: str, tokenizer: Tokenizer) -> None:
    assert fault(ShareGPTDataset("x"), tokenizer, fields).startswith(message)


def test_instruct_writes_a_question_and_an_answer(tokenizer: Tokenizer) -> None:
    rows = [
        {"instruction": "Add.", "input": "2, 2", "output": "4"},
        {"instruction": "Add.", "input": "", "output": "4"},
        {"instruction": "Add.", "output": "4"},
        {"instruction": "Add.", "input": None, "output": "4", "system": "Be long.", "history": [["a", "b"]]},
    ]
    said = [
        ["Be brief.", "Add.\n\n2, 2", "4"],
        ["Be brief.", "Add.", "4"],
        ["Be brief.", "Add.", "4"],
        ["Be long.", "a", "b", "Add.", "4"],
    ]
    roles = ("system", "user", "assistant", "user", "assistant")
    talks = [[{"role": r, "content": c} for r, c in zip(roles, texts, strict=False)] for texts in said]
    choice = InstructDataset("x", system_prompt="Be brief.")
    assert whole(choice, tokenizer, *rows) == [tokenizer.render(talk) for talk in talks]
    assert taught(choice, tokenizer, *rows) == [*["4<|im_end|>"] * 3, "b<|im_end|>4<|im_end|>"]
    assert taught(replace(choice, train_on="last"), tokenizer, rows[3]) == ["4<|im_end|>"]
    other = InstructDataset("x", prompt_column="input", input_column=None, response_column="instruction")
    assert taught(other, tokenizer, rows[0]) == ["Add.<|im_end|>"]
    assert fault(InstructDataset("x", input_column="contxt"), tokenizer, rows[0]).startswith(
        "the row has no column 'contxt'; name the right one as `input` ("
    )
    for history, message in (
        ({}, "history: want a list of pairs, this is an object"),
        ([["a"]], "history[0]: want"),
    ):
        assert fault(choice, tokenizer, {**rows[0], "history": history}).startswith(message)


def test_a_completion_is_learnt_and_its_prompt_is_not(folders: dict[str, Path], tokenizer: Tokenizer) -> None:
    row = {"prompt": "Question: 2 + 2?\nAnswer:", "completion": " It is 4."}
    headers = Tokenizer.open(folders["headers"])
    assert whole(CompletionDataset("x"), headers, row) == ["<|begin|>Question: 2 + 2?\nAnswer: It is 4.<|end_of_text|>"]
    (found,) = documents(CompletionDataset("x"), headers, row)
    assert headers.decode(found.tokens[found.learnt].tolist(), special=True) == " It is 4.<|end_of_text|>"
    assert found.tokens[1:-1].tolist() == headers.encode(row["prompt"] + row["completion"]), "one text, one way"
    assert taught(CompletionDataset("x", train_on="all"), headers, row) == [row["prompt"] + " It is 4.<|end_of_text|>"]
    assert taught(CompletionDataset("x", eos_token="<|endoftext|>"), tokenizer, row) == [" It is 4.<|endoftext|>"]
    lists = {"prompt": TALK[:3], "completion": TALK[3:]}
    assert taught(CompletionDataset("x"), tokenizer, lists) == ["Hello there 😀<|im_end|>"]
    assert whole(CompletionDataset("x"), tokenizer, lists) == [tokenizer.render(TALK)]
    for mixed in ({"prompt": ASK["content"], "completion": [SAY]}, {"prompt": [ASK], "completion": SAY["content"]}):
        assert whole(CompletionDataset("x"), tokenizer, mixed) == [tokenizer.render([ASK, SAY])]
    assert fault(CompletionDataset("x"), tokenizer, {"prompt": 3, "completion": "a"}) == (
        "prompt: want a string or a list of messages, this is a number"
    )


def test_text_is_learnt_whole_between_bos_and_an_end(folders: dict[str, Path], tokenizer: Tokenizer) -> None:
    row = {"text": "Hello there. 😀"}
    headers = Tokenizer.open(folders["headers"])
    assert whole(TextDataset("x"), headers, row) == ["<|begin|>Hello there. 😀<|end_of_text|>"]
    assert taught(TextDataset("x"), headers, row) == ["Hello there. 😀<|end_of_text|>"]
    assert whole(TextDataset("x", eos_token="<|endoftext|>"), tokenizer, row) == ["Hello there. 😀<|endoftext|>"]
    assert whole(TextDataset("x"), tokenizer, {"text": "Hello.<|im_end|>"}) == ["Hello.<|im_end|>"], "no second end"
    with pytest.raises(UserError, match="the tokenizer has no token '<end>'; name one of its tokens as `end`"):
        TextDataset("x", eos_token="<end>").prepare(tokenizer)
    tokenizer.eos = None
    with pytest.raises(UserError, match="the tokenizer names no end-of-text token"):
        TextDataset("x").prepare(tokenizer)


@pytest.mark.parametrize("length", [2, 3, 4, 7, 100])
def test_every_token_of_a_long_text_is_learnt_once(length: int, tokenizer: Tokenizer) -> None:
    rows = {"text": "Hello there. Thanks"}, {"text": "Hello"}
    for choice in (TextDataset, AutoDataset):
        parts = [*documents(choice("x", max_length=length), tokenizer, *rows)]
        assert all(len(part.tokens) <= length and part.whole == len(part.tokens) for part in parts)
        targets = [token for part in parts for token in part.tokens[1:].tolist()]
        texts = [tokenizer.encode(row["text"]) + [tokenizer.eos] for row in rows]
        assert targets == [token for text in texts for token in text[1:]]
    cut = [*documents(TextDataset("x", max_length=length, excess_length_strategy="truncate"), tokenizer, *rows)]
    assert [part.tokens.tolist() for part in cut] == [text[:length] for text in texts]
    assert [part.whole for part in cut] == [len(text) for text in texts]


def test_a_row_that_is_cut_has_no_false_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(tokenizer.render(TALK))
    rows = ChatDataset("x", max_length=len(ids) - 4)
    cut, short = documents(rows, tokenizer, {"messages": TALK}, {"messages": TALK[:2]})
    assert cut.tokens.tolist() == ids[:-4] and cut.whole == len(ids)
    assert cut.learnt[-1] and cut.tokens[-1] != tokenizer.eos
    assert short.whole == len(short.tokens)


def test_what_is_too_long_may_be_dropped_or_gone_on_with(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(tokenizer.render(TALK))
    assert [
        *documents(
            ChatDataset("x", max_length=len(ids) - 1, excess_length_strategy="drop"), tokenizer, {"messages": TALK}
        )
    ] == []
    (kept,) = documents(
        ChatDataset("x", max_length=len(ids), excess_length_strategy="drop"), tokenizer, {"messages": TALK}
    )
    assert kept.tokens.tolist() == ids
    parts = [
        *documents(
            ChatDataset("x", max_length=len(ids) // 2, excess_length_strategy="split"), tokenizer, {"messages": TALK}
        )
    ]
    assert len(parts) > 1
    learnt = [token for part in parts for token in part.tokens[1:][part.learnt[1:]].tolist()]
    assert tokenizer.decode(learnt, special=True) == BOTH


def test_rows_are_recognised_by_their_columns(tokenizer: Tokenizer) -> None:
    rows = {
        "OpenAI messages (column 'messages')": ({"messages": TALK, "text": "a"}, ChatDataset("x")),
        "OpenAI messages (column 'conversation')": (
            {"conversation": TALK},
            ChatDataset("x", messages_column="conversation"),
        ),
        "ShareGPT (column 'conversations')": (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            ShareGPTDataset("x"),
        ),
        "Alpaca (columns 'instruction', 'output')": ({"instruction": "a", "output": "b"}, InstructDataset("x")),
        "prompts with completions (columns 'prompt', 'completion')": (
            {"prompt": "a", "completion": "b", "label": None},
            CompletionDataset("x"),
        ),
        "plain text (column 'text')": ({"text": "a", "messages": None, "prompt": None}, TextDataset("x")),
    }
    for says, (row, choice) in rows.items():
        assert AutoDataset("x").says(row) == says
        assert taught(AutoDataset("x"), tokenizer, row) == taught(choice, tokenizer, row)
    named = AutoDataset("x", train_on="last", max_length=1000, chat_template="a.jinja")
    (chat,) = (named.choice({"messages": TALK}),)
    assert chat == ChatDataset("x", train_on="last", max_length=1000, chat_template="a.jinja")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"foo": 1, "bar": "a", "none": None},
            "no format is known by its columns, which are foo (a number), bar (a ",
        ),
        ({}, "no format is known by its columns, which are none; name one as `kind`"),
        ({"text": 3}, "no format is known by its columns, which are text (a number)"),
        (
            {"chosen": "a", "rejected": "b"},
            "these are preference pairs (columns 'chosen', 'rejected'), from which this recipe does not learn",
        ),
        (
            {"prompt": "a", "completion": "b", "label": True},
            "these are completions with marks (columns 'prompt', 'com",
        ),
        ({"messages": []}, "messages: the conversation is empty"),
    ],
)
def test_what_is_not_recognised_is_told(fields: dict, message: str, tokenizer: Tokenizer) -> None:
    assert fault(AutoDataset("x"), tokenizer, fields).startswith(message)


def test_preferences_are_two_documents_with_one_prompt(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.open(folders["headers"])
    better, worse = {"role": "assistant", "content": "Four."}, {"role": "assistant", "content": "Five."}
    ends = ["Four.<|eot_id|>", "Five.<|eot_id|>"]
    for row in (
        {"chosen": [ASK, better], "rejected": [ASK, worse]},
        {"chosen": [ASK, better], "rejected": [ASK, worse], "prompt": ASK["content"]},
        {"chosen": [ASK, better], "rejected": [ASK, worse], "prompt": [ASK]},
        {"chosen": [better], "rejected": [worse], "prompt": [ASK]},
        {"chosen": [better], "rejected": [worse], "prompt": ASK["content"]},
        {"chosen": "Four.", "rejected": "Five.", "prompt": [ASK]},
    ):
        assert taught(PreferenceDataset("x"), tokenizer, row) == ends
        assert whole(PreferenceDataset("x"), tokenizer, row) == [
            tokenizer.render([ASK, side]) for side in (better, worse)
        ]
    earlier = {"chosen": [*TALK[:3], better], "rejected": [*TALK[:3], worse]}
    assert taught(PreferenceDataset("x"), tokenizer, earlier) == ends, "what both have said before is no preference"


def test_preferences_may_be_texts(tokenizer: Tokenizer) -> None:
    said = {"prompt": "2 + 2 =", "chosen": " four", "rejected": " five"}
    assert taught(PreferenceDataset("x"), tokenizer, said) == [" four<|im_end|>", " five<|im_end|>"]
    implicit = {"chosen": "2 + 2 = four", "rejected": "2 + 2 = five"}
    assert taught(PreferenceDataset("x"), tokenizer, implicit) == [" four<|im_end|>", " five<|im_end|>"]
    assert whole(PreferenceDataset("x"), tokenizer, implicit) == whole(PreferenceDataset("x"), tokenizer, said)
    assert [*documents(PreferenceDataset("x", excess_length_strategy="drop", max_length=3), tokenizer, said)] == [], (
        "both or none"
    )
    both = {**said, **implicit}
    assert taught(PreferenceDataset("x"), tokenizer, both) == [" four<|im_end|>", " five<|im_end|>"], (
        "it stands there once"
    )
    assert whole(PreferenceDataset("x"), tokenizer, both) == whole(PreferenceDataset("x"), tokenizer, said)


def test_a_question_that_sides_repeat_is_asked_once(tokenizer: Tokenizer) -> None:
    """Some keep it in the prompt, behind a system message, and in front of both answers too."""
    system, better, worse = {"role": "system", "content": "Be brief."}, SAY, {**SAY, "content": "It is 5."}
    plain = {"prompt": [system, ASK], "chosen": [better], "rejected": [worse]}
    again = {"prompt": [system, ASK], "chosen": [ASK, better], "rejected": [ASK, worse]}
    assert whole(PreferenceDataset("x"), tokenizer, again) == whole(PreferenceDataset("x"), tokenizer, plain)
    assert taught(PreferenceDataset("x"), tokenizer, again) == taught(PreferenceDataset("x"), tokenizer, plain)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chosen": "a", "rejected": "a"}, "chosen and rejected are the same: nothing is preferred"),
        ({"chosen": [ASK, SAY]}, "the row has no column 'rejected'; name the right one as `rejected`"),
        ({"chosen": [ASK], "rejected": [ASK, SAY]}, "nothing to learn: the conversation has no assistant message"),
        (
            {"prompt": "a", "chosen": "b", "rejected": None},
            "rejected: is null, and a pair is two answers: write it, or pass over such rows by `on_bad_row: "
            "skip` beside",
        ),
        ({"prompt": [ASK], "chosen": [], "rejected": [SAY]}, "chosen: is an empty list, and a pair is two answers"),
        ({"chosen": 3, "rejected": "a"}, "chosen: want a string or a list of messages, this is a number"),
        (
            {"chosen": [ASK, 3], "rejected": [ASK, SAY]},
            "chosen[1]: want an object with role and content, this is",
        ),
    ],
)
def test_wrong_preferences_are_told(fields: dict, message: str, tokenizer: Tokenizer) -> None:
    assert fault(PreferenceDataset("x"), tokenizer, fields).startswith(message)


def test_marks_are_signs_of_the_document(tokenizer: Tokenizer) -> None:
    rows = [
        {"prompt": [ASK], "completion": [SAY], "label": True},
        {"prompt": "2 + 2 =", "completion": " four", "label": False},
    ]
    assert taught(UnpairedPreferenceDataset("x"), tokenizer, *rows) == ["It is 4.<|im_end|>", " four<|im_end|>"]
    assert [document.signs for document in documents(UnpairedPreferenceDataset("x"), tokenizer, *rows)] == [
        DocFlags.GOOD,
        DocFlags.BAD,
    ]
    assert (
        fault(UnpairedPreferenceDataset("x"), tokenizer, {**rows[0], "label": 1})
        == "label: want true or false, this is a number"
    )


BAD = [
    ({"chat": []}, "the row has no column 'messages'; name the right one as `messages` (it has: chat)"),
    ({"messages": TALK[:1]}, "nothing to learn: the conversation has no assistant message"),
    ({"messages": TALK, "tools": "["}, "tools: a string that holds no JSON: "),
    (
        {"messages": [ASK, {"role": "assistant", "content": "\ud800"}]},
        "the text holds a lone surrogate (U+D800)",
    ),
    ({"messages": [{"role": "user", "content": "what " * 300}, SAY]}, "nothing to learn in its first 64 tokens: "),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_a_row_that_cannot_be_learnt_from_is_a_fault_among_others(
    row: dict, message: str, tokenizer: Tokenizer
) -> None:
    fine = Row("a:1", {"messages": TALK})
    found = ChatDataset("x", max_length=64).encode(tokenizer, [fine, Row("a:2", row), fine, BadRow("a:4", "no JSON")])
    assert isinstance(found[1], BadRow) and found[1].where == "a:2" and found[1].reason.startswith(message)
    assert "\n" not in found[1].reason
    assert found[3] == BadRow("a:4", "no JSON")
    first, third = found[0], found[2]
    assert isinstance(first, list) and isinstance(third, list)
    assert first[0].tokens.tolist() == third[0].tokens.tolist()


def test_text_rows_are_checked_too(tokenizer: Tokenizer) -> None:
    for row, message in [
        ({"texts": "a"}, "the row has no column 'text'; name the right one as `column`"),
        ({"text": 3}, "text: want a string, this is a number"),
        ({"text": "a\udfff"}, "the text holds a lone surrogate"),
        ({"text": ""}, "nothing to learn in its 1 tokens"),
    ]:
        assert fault(TextDataset("x"), tokenizer, row).startswith(message)


def test_a_template_that_refuses_is_told(folders: dict[str, Path]) -> None:
    row = {"messages": [{"role": "system", "content": "Hi"}, *TALK]}
    said = fault(ChatDataset("x"), Tokenizer.open(folders["turns"]), row)
    assert "the chat template fails: System role not supported" in said


def test_a_tokenizer_without_a_template_is_told_before_any_row(tokenizer: Tokenizer) -> None:
    tokenizer.templates = {}
    with pytest.raises(UserError, match="^the tokenizer has no chat template; name a Jinja file as `chat_template`"):
        ChatDataset("x").prepare(tokenizer)
    assert len([*documents(AutoDataset("x"), tokenizer, {"text": "Hello there"})]) == 1
    assert fault(AutoDataset("x"), tokenizer, {"messages": TALK}).startswith(
        "the tokenizer has no chat template; name a Jin"
    )


def test_a_template_may_be_named(folders: dict[str, Path], tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(
        "{{ tools[0].name }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    rows = ChatDataset("x", messages_column="talk", chat_template=str(tmp_path / "own.jinja"))
    row = {"talk": TALK[:2], "tools": [{"name": "add"}]}
    want = "add<|im_start|>What is 2 + 2?<|im_end|><|im_start|>It is 4.<|im_end|>"
    assert whole(rows, tokenizer, row) == whole(
        AutoDataset("x", chat_template=rows.chat_template), tokenizer, {**row, "messages": TALK[:2]}
    )
    assert whole(rows, tokenizer, row) == [want]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"source": ""}, "source"),
        ({"split": "train["}, "split"),
        ({"max_length": 1}, "max_length"),
        ({"max_samples": 0}, "max_samples"),
        ({"max_bad_row_fraction": 1.5}, "max_bad_row_fraction"),
        ({"num_proc": -1}, "num_proc"),
    ],
)
def test_a_choice_refuses_what_makes_no_sense(fields: dict, field: str) -> None:
    for choice in (AutoDataset, TextDataset):
        with pytest.raises(FieldError) as told:
            choice(**{"source": "rows.jsonl", **fields})
        assert told.value.field == field
    with pytest.raises(FieldError, match="train_on: name at least one role"):
        ChatDataset("rows.jsonl", train_on=())


def test_what_is_compared_cannot_be_split_or_learnt_whole() -> None:
    for fields in ({"excess_length_strategy": "split"}, {"train_on": "all"}):
        for choice in (PreferenceDataset, UnpairedPreferenceDataset):
            with pytest.raises(FieldError):
                choice("x", **fields)


def test_the_code_of_rows_is_what_decides_what_they_become() -> None:
    served = {
        "max_samples": 3,
        "packing": True,
        "shuffle": False,
        "num_proc": 2,
        "on_bad_row": "skip",
        "streaming": True,
        "split": "a",
    }
    assert AutoDataset("x").code() == AutoDataset("y", **served).code()
    for other in (
        {"max_length": 7},
        {"train_on": "last"},
        {"excess_length_strategy": "drop"},
        {"chat_template": "a"},
        {"eos_token": "a"},
    ):
        assert AutoDataset("x").code() != AutoDataset("x", **other).code()


def test_a_source_can_be_checked_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xff")
    ChatDataset(str(path)).check()
    with pytest.raises(UserError, match="no such file or folder"):
        ChatDataset(str(tmp_path / "gone.jsonl")).check()
    with pytest.raises(UserError, match="gone.jinja: no such chat template file"):
        InstructDataset(str(path), chat_template="gone.jinja").check()
