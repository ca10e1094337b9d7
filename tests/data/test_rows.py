"""The choices of `data:` from a file to batches, and a line that names the row for each that cannot be learnt from."""

import json
import sys
from pathlib import Path

import pytest

from tunekit.data.batch import IGNORE
from tunekit.data.loader import load
from tunekit.data.rows import Chat, Instruct, Rows, Text
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import FieldError, UserError

TALK = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "Thanks."},
    {"role": "assistant", "content": "Hello there 😀"},
]


@pytest.fixture
def tokenizer(folders: dict[str, Path]) -> Tokenizer:
    return Tokenizer.open(folders["chatml"])


def save(folder: Path, *rows: object) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def taught(rows: Rows, tokenizer: Tokenizer, place) -> list[str]:
    """What each row of the first step teaches, as text."""
    (batch,) = load(rows, tokenizer, 8, 8, place())[0]
    return [tokenizer.decode(row[row != IGNORE].tolist(), special=True) for row in batch.targets]


def whole(rows: Rows, tokenizer: Tokenizer, place) -> list[str]:
    documents = load(rows, tokenizer, 8, 8, place()).rows
    return [tokenizer.decode(document.tokens.tolist(), special=True) for document in documents]


@pytest.mark.parametrize("pack", [False, True])
def test_chat_teaches_what_the_assistant_says(pack: bool, tokenizer, place, tmp_path: Path) -> None:
    path = save(tmp_path, {"messages": TALK, "tools": None}, {"messages": TALK[:2], "tools": []})
    rows = Chat(path, pack=pack, length=200)
    both = ["It is 4.<|im_end|>Hello there 😀<|im_end|>", "It is 4.<|im_end|>"]
    assert taught(rows, tokenizer, place) == (["".join(both)] if pack else both)
    assert whole(rows, tokenizer, place) == [tokenizer.render(TALK), tokenizer.render(TALK[:2])]
    last = Chat(path, learn="last", limit=1)
    assert taught(last, tokenizer, place) == ["Hello there 😀<|im_end|>"]
    everything = Chat(path, learn="all", limit=1)
    assert taught(everything, tokenizer, place) == [tokenizer.render(TALK).removeprefix("<|im_start|>")]


def test_chat_takes_another_column_a_template_and_tools(folders, tokenizer, place, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(
        "{{ tools[0].name }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    path = save(tmp_path, {"talk": TALK[:2], "tools": [{"name": "add"}]})
    rows = Chat(path, messages="talk", template=str(tmp_path / "own.jinja"))
    assert whole(rows, tokenizer, place) == ["add<|im_start|>What is 2 + 2?<|im_end|><|im_start|>It is 4.<|im_end|>"]


def test_instruct_writes_a_question_and_an_answer(tokenizer, place, tmp_path: Path) -> None:
    rows = [
        {"instruction": "Add.", "input": "2, 2", "output": "4"},
        {"instruction": "Add.", "input": "", "output": "4"},
        {"instruction": "Add.", "output": "4"},
    ]
    path = save(tmp_path, *rows)
    system = {"role": "system", "content": "Be brief."}
    talks = [
        [system, {"role": "user", "content": text}, {"role": "assistant", "content": "4"}]
        for text in ("Add.\n\n2, 2", "Add.", "Add.")
    ]
    choice = Instruct(path, system="Be brief.")
    assert whole(choice, tokenizer, place) == [tokenizer.render(talk) for talk in talks]
    assert taught(choice, tokenizer, place) == ["4<|im_end|>"] * 3
    other = Instruct(path, prompt="input", input=None, response="instruction", limit=1)
    assert taught(other, tokenizer, place) == ["Add.<|im_end|>"]
    with pytest.raises(
        UserError, match=r"rows.jsonl:1: the row has no column 'contxt'; name the right one as `input` \("
    ):
        load(Instruct(path, input="contxt"), tokenizer, 1, 1, place())


def test_text_is_learnt_whole_between_bos_and_an_end(folders, tokenizer, place, tmp_path: Path) -> None:
    path = save(tmp_path, {"text": "Hello there. 😀"})
    headers = Tokenizer.open(folders["headers"])
    assert whole(Text(path), headers, place) == ["<|begin|>Hello there. 😀<|end_of_text|>"]
    assert taught(Text(path), headers, place) == ["Hello there. 😀<|end_of_text|>"]
    assert whole(Text(path, end="<|endoftext|>"), tokenizer, place) == ["Hello there. 😀<|endoftext|>"]
    with pytest.raises(UserError, match="the tokenizer has no token '<end>'; name one of its tokens as `end`"):
        load(Text(path, end="<end>"), tokenizer, 1, 1, place())
    tokenizer.eos = None
    with pytest.raises(UserError, match="the tokenizer names no end-of-text token"):
        load(Text(path), tokenizer, 1, 1, place())


def test_a_row_that_is_cut_has_no_false_end(tokenizer, place, tmp_path: Path) -> None:
    ids = tokenizer.encode(tokenizer.render(TALK))
    path = save(tmp_path, {"messages": TALK}, {"messages": TALK[:2]})
    loader = load(Chat(path, length=len(ids) - 4), tokenizer, 2, 2, place())
    assert loader.rows[0].tokens.tolist() == ids[:-4]
    assert loader.rows[0].learnt[-1]
    assert loader.rows[0].tokens[-1] != tokenizer.eos
    assert (loader.report.truncated, loader.report.longest) == (1, len(ids) - 4)
    assert "1 truncated" in str(loader.report)


@pytest.mark.parametrize("length", [2, 3, 4, 7, 100])
def test_every_token_of_a_long_text_is_learnt_once(length: int, tokenizer, place, tmp_path: Path) -> None:
    path = save(tmp_path, {"text": "Hello there. Thanks"}, {"text": "Hello"})
    whole = [*load(Text(path, shuffle=False), tokenizer, 1, 1, place()).rows]
    parts = [*load(Text(path, length=length, shuffle=False), tokenizer, 1, 1, place()).rows]
    assert all(len(part.tokens) <= length for part in parts)
    targets = [token for part in parts for token in part.tokens[1:].tolist()]
    assert targets == [token for text in whole for token in text.tokens[1:].tolist()]


def test_rows_are_many_and_the_bar_is_rank_zeros(tokenizer, place, tmp_path: Path, capsys, monkeypatch) -> None:
    path = save(tmp_path, *({"messages": [TALK[0], {"role": "assistant", "content": f"No. {i}"}]} for i in range(1200)))
    loader = load(Chat(path), tokenizer, 8, 2, place(1, 2))
    assert capsys.readouterr().err == ""
    answers = [tokenizer.decode(document.tokens[document.learnt].tolist()) for document in loader.rows]
    assert answers == [f"No. {i}" for i in range(1200)]
    load(Chat(path), tokenizer, 8, 2, place())
    assert capsys.readouterr().err == "", "a log is no place for a bar"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    load(Chat(path), tokenizer, 8, 2, place(1, 2))
    assert capsys.readouterr().err == ""
    load(Chat(path), tokenizer, 8, 2, place())
    assert "preparing" in capsys.readouterr().err


BAD = [
    ({"chat": []}, r"the row has no column 'messages'; name the right one as `messages` \(it has: chat\)"),
    ({"messages": None}, "messages: want a list of messages, this is null"),
    ({"messages": []}, "messages: the conversation is empty"),
    ({"messages": ["hi"]}, r"messages\[0\]: want an object with role and content, this is a string"),
    ({"messages": [{"role": "bot", "content": "hi"}]}, r"messages\[0\]: unknown role 'bot'; want one of system, "),
    ({"messages": [{"content": "hi"}]}, r"messages\[0\]: unknown role None"),
    ({"messages": [{"role": ["user"], "content": "hi"}]}, r"messages\[0\]: unknown role \['user'\]"),
    (
        {"messages": [TALK[0], {"role": "assistant", "content": None}]},
        r"messages\[1\]: content must be a string, .* null",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, r"messages\[0\]: content must .* this is a list"),
    ({"messages": [TALK[0], {**TALK[1], "tool_calls": [1]}]}, r"messages\[1\]: 'tool_calls' is not supported"),
    ({"messages": [TALK[0], {**TALK[1], "weight": 0}]}, r"messages\[1\]: 'weight' is not supported"),
    ({"messages": TALK[:1]}, "nothing to learn: the conversation has no assistant message"),
    ({"messages": TALK, "tools": "[]"}, "tools: want a list of tool schemas .objects., this is a string"),
    ({"messages": [TALK[0], {"role": "assistant", "content": "\ud800"}]}, r"lone surrogate \(U\+D800\)"),
    ({"messages": [{"role": "user", "content": "what " * 300}, TALK[1]]}, "nothing to learn in its first 64 tokens: "),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_a_row_that_cannot_be_learnt_from_is_named(row, message, tokenizer, place, tmp_path: Path) -> None:
    path = save(tmp_path, {"messages": TALK}, row)
    with pytest.raises(UserError, match=f"^{path}:2: .*{message}") as told:
        load(Chat(path, length=64), tokenizer, 1, 1, place())
    assert "\n" not in str(told.value)


def test_text_rows_are_checked_too(tokenizer, place, tmp_path: Path) -> None:
    for row, message in [
        ({"texts": "a"}, "the row has no column 'text'; name the right one as `column`"),
        ({"text": 3}, "text: want a string, this is a number"),
        ({"text": "a\udfff"}, "lone surrogate"),
        ({"text": ""}, "nothing to learn in its 1 tokens"),
    ]:
        path = save(tmp_path, {"text": "fine"}, row)
        with pytest.raises(UserError, match=f"^{path}:2: .*{message}"):
            load(Text(path), tokenizer, 1, 1, place())


def test_a_template_that_refuses_names_the_row(folders, place, tmp_path: Path) -> None:
    path = save(tmp_path, {"messages": TALK}, {"messages": [{"role": "system", "content": "Hi"}, *TALK]})
    with pytest.raises(UserError, match=f"^{path}:2: .*the chat template fails: System role not supported"):
        load(Chat(path), Tokenizer.open(folders["turns"]), 1, 1, place())


def test_a_tokenizer_without_a_template_is_told_before_any_row(folders, tokenizer, place, tmp_path: Path) -> None:
    tokenizer.templates = {}
    with pytest.raises(UserError, match="^the tokenizer has no chat template; name a Jinja file as `template`"):
        load(Chat(save(tmp_path, {"bad": 1})), tokenizer, 1, 1, place())
    text = Text(save(tmp_path, {"text": "Hello there"}))
    assert len(load(text, tokenizer, 1, 1, place()).rows) == 1


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"source": ""}, "source"), ({"split": "train["}, "split"), ({"length": 1}, "length"), ({"limit": 0}, "limit")],
)
def test_a_choice_refuses_what_makes_no_sense(fields: dict, field: str) -> None:
    with pytest.raises(FieldError) as told:
        Chat(**{"source": "rows.jsonl", **fields})
    assert told.value.field == field


def test_a_source_can_be_checked_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xff")
    Chat(str(path)).check()
    with pytest.raises(UserError, match="no such file or folder"):
        Chat(str(tmp_path / "gone.jsonl")).check()
    with pytest.raises(UserError, match="gone.jinja: no such chat template file"):
        Instruct(str(path), template="gone.jinja").check()
