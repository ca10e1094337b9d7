"""Ids equal those of transformers, whatever the template; text comes out of a stream as it does of a whole."""

import json
import shutil
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tunekit.data.tokenizer import TextStreamer, Tokenizer
from tunekit.errors import UserError

NAMES = ["chatml", "thinking", "headers", "turns", "brackets", "closed", "plain", "generation"]
TALK = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4. 😀"},
    {"role": "user", "content": "Thanks; 你好 <b>&\n\n"},
    {"role": "assistant", "content": "naïve\n\n  café"},
]
SYSTEM = {"role": "system", "content": " Be brief. "}


def conversations(name: str) -> list[list[dict]]:
    talks = [TALK, TALK[:1], TALK[:2], TALK[:3]]
    return talks if name in ("turns", "brackets") else [*talks, [SYSTEM, *TALK]]


@pytest.mark.parametrize("name", NAMES)
def test_rendered_ids_equal_transformers(name: str, folders: dict[str, Path]) -> None:
    ours, theirs = Tokenizer.open(folders[name]), AutoTokenizer.from_pretrained(folders[name])
    for talk in conversations(name):
        for prompt in (False, True):
            want = theirs.apply_chat_template(talk, add_generation_prompt=prompt, return_dict=False)
            assert ours.encode(ours.render(talk, prompt=prompt)) == want
        assert ours.prompt(talk) == theirs.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)


def test_tools_and_reasoning_and_nulls_are_rendered_as_transformers_does(folders: dict[str, Path]) -> None:
    ours, theirs = Tokenizer.open(folders["thinking"]), AutoTokenizer.from_pretrained(folders["thinking"])
    tools = [{"type": "function", "function": {"name": "né<e>", "parameters": {"b": 1, "a": [1.5, None, True]}}}]
    talk = [TALK[0], {"role": "assistant", "content": "4", "thinking": "Two and two.", "tool_calls": None}]
    assert ours.render(talk, tools) == theirs.apply_chat_template(talk, tools=tools, tokenize=False)
    assert "Two and two." in ours.render(talk, tools)
    assert "né<e>" in ours.render(talk, tools)


@pytest.mark.parametrize("name", NAMES)
def test_plain_text_is_encoded_and_decoded_as_transformers_does(name: str, folders: dict[str, Path]) -> None:
    ours, theirs = Tokenizer.open(folders[name]), AutoTokenizer.from_pretrained(folders[name])
    for text in ("It is so: naïve café, 你好 😀", "", "  two  spaces\n"):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, special=True) == theirs.encode(text)
        assert ours.decode(theirs.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
        assert ours.decode(theirs.encode(text), special=True) == theirs.decode(theirs.encode(text))
    assert (ours.bos, ours.eos, ours.size) == (theirs.bos_token_id, theirs.eos_token_id, len(theirs))


def test_the_pad_is_the_tokenizers_own_else_eos_else_zero(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["chatml"], tmp_path / "folder")
    assert Tokenizer.open(folder).pad == Tokenizer.open(folder).eos
    (folder / "tokenizer_config.json").write_text('{"pad_token": "<|endoftext|>"}')
    assert Tokenizer.open(folder).pad == AutoTokenizer.from_pretrained(folders["chatml"]).encode("<|endoftext|>")[0]
    (folder / "tokenizer_config.json").unlink()
    assert (Tokenizer.open(folder).pad, Tokenizer.open(folder).eos) == (0, None)


@pytest.mark.parametrize(("value", "stops"), [(3, {3}), ([3, 5], {3, 5}), (None, set())])
def test_stops_are_those_of_the_generation_config_and_eos(value, stops, folders, tmp_path: Path) -> None:
    folder = shutil.copytree(folders["chatml"], tmp_path / "folder")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    tokenizer = Tokenizer.open(folder)
    assert tokenizer.stops == stops | {tokenizer.eos}


def test_templates_come_from_a_file_a_list_or_a_name(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["chatml"], tmp_path / "folder")
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with {{ tools[0].name }}"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    for tools in (None, [{"name": "add"}]):
        theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(TALK, tools=tools, tokenize=False)
        assert Tokenizer.open(folder).render(TALK, tools) == theirs
    (folder / "chat_template.jinja").write_text("from a file")
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(TALK, tokenize=False)
    assert Tokenizer.open(folder).render(TALK) == theirs == "from a file"
    (tmp_path / "own.jinja").write_text("my own")
    assert Tokenizer.open(folder, str(tmp_path / "own.jinja")).render(TALK) == "my own"
    with pytest.raises(UserError, match="gone.jinja: no such file; name a Jinja file as `chat_template`"):
        Tokenizer.open(folder, "gone.jinja")


def test_templates_may_be_given_a_day(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "day.jinja").write_text("{{ strftime_now('%d %b %Y') }}")
    tokenizer = Tokenizer.open(folders["headers"]).dated(date(2024, 2, 29))
    assert tokenizer.with_template(str(tmp_path / "day.jinja")).render(TALK) == "29 Feb 2024"


def test_special_tokens_of_an_older_folder_come_from_a_map(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["headers"], tmp_path / "folder")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "special_tokens_map.json").write_text(
        '{"bos_token": {"content": "<|begin|>"}, "eos_token": "<|eot_id|>"}'
    )
    ours, theirs = Tokenizer.open(folder), AutoTokenizer.from_pretrained(folder)
    assert (ours.bos, ours.eos) == (theirs.bos_token_id, theirs.eos_token_id)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_stream_prints_what_the_whole_decodes_to(folders: dict[str, Path], text: str) -> None:
    for name in ("chatml", "turns"):
        tokenizer = Tokenizer.open(folders[name]) if name not in OPEN else OPEN[name]
        OPEN[name] = tokenizer
        ids, stream = tokenizer.encode(text), TextStreamer(tokenizer)
        pieces = [stream.add(token) for token in ids]
        assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text
        assert "".join(pieces) + stream.end() == tokenizer.decode(ids)


OPEN: dict[str, Tokenizer] = {}


def test_a_stream_holds_back_half_a_character(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.open(folders["chatml"])
    ids = tokenizer.encode("🜁")
    assert len(ids) > 1
    stream = TextStreamer(tokenizer)
    assert [stream.add(token) for token in ids] == [""] * (len(ids) - 1) + ["🜁"]
    assert stream.add(ids[0]) == ""
    assert stream.end() == "\ufffd"


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("tokenizer.json", None, "no tokenizer.json; fetch the checkpoint's"),
        ("tokenizer.json", '{"model": ', "tokenizer.json: unreadable"),
        ("tokenizer.json", '{"version": 1}', "tokenizer.json: holds no tokenizer"),
        ("tokenizer.json", '{"model": {}}', "tokenizer.json: holds no tokenizer"),
        ("tokenizer.json", '{"model": {"type": "BPE"}}', "tokenizer.json: holds no tokenizer"),
        ("tokenizer.json", '{"model": {"type": "WordLevel", "vocab": {"a": 0}}, "added_tokens": 5}', "no tokenizer"),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}', "no tokenizer"),
        ("tokenizer_config.json", "[1]", "tokenizer_config.json: want a JSON object"),
        ("generation_config.json", "{", "generation_config.json: unreadable"),
    ],
)
def test_a_broken_folder_is_told_in_a_line(file, text, message, folders, tmp_path: Path) -> None:
    folder = shutil.copytree(folders["chatml"], tmp_path / "folder")
    (folder / file).unlink(missing_ok=True)
    if text is not None:
        (folder / file).write_text(text)
    with pytest.raises(UserError, match=message) as told:
        Tokenizer.open(folder)
    assert "\n" not in str(told.value)
    assert str(folder) in str(told.value)


def test_a_tokenizer_that_knows_more_than_the_model(folders: dict[str, Path]) -> None:
    """Ordinary tokens beyond the embeddings are another model's; added ones are refused where they come up."""
    tokenizer = Tokenizer.open(folders["chatml"])
    added = tokenizer.model.get_added_tokens_decoder()
    last = max(added)
    assert last == tokenizer.size - 1
    tokenizer.fitted(tokenizer.size + 50, "here").encode(added[last].content)
    with pytest.raises(UserError, match="here: its tokenizer knows [0-9]+ tokens and its model 30: the tokenizer is"):
        tokenizer.fitted(30, "here")
    fitted = tokenizer.fitted(last, "here")
    assert fitted.encode("hello there") == tokenizer.encode("hello there")
    with pytest.raises(UserError) as told:
        fitted.encode(f"hello {added[last].content}")
    assert str(told.value) == f"the text holds the token {added[last].content!r} ({last}), but the model knows {last}"
