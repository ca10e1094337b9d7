"""Token ids equal those of transformers for any template, and a streamed text equals the decoded one."""

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
CONVERSATION = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4. 😀"},
    {"role": "user", "content": "Thanks; 你好 <b>&\n\n"},
    {"role": "assistant", "content": "naïve\n\n  café"},
]
SYSTEM = {"role": "system", "content": " Be brief. "}


def conversations(name: str) -> list[list[dict]]:
    variants = [CONVERSATION, CONVERSATION[:1], CONVERSATION[:2], CONVERSATION[:3]]
    return variants if name in ("turns", "brackets") else [*variants, [SYSTEM, *CONVERSATION]]


@pytest.mark.parametrize("name", NAMES)
def test_rendered_token_ids_equal_transformers(name: str, tokenizer_dirs: dict[str, Path]) -> None:
    ours, theirs = Tokenizer.open(tokenizer_dirs[name]), AutoTokenizer.from_pretrained(tokenizer_dirs[name])
    for conversation in conversations(name):
        for prompt in (False, True):
            expected = theirs.apply_chat_template(conversation, add_generation_prompt=prompt, return_dict=False)
            assert ours.encode(ours.render(conversation, prompt=prompt)) == expected
        assert ours.encode_prompt(conversation) == theirs.apply_chat_template(
            conversation, add_generation_prompt=True, return_dict=False
        )


def test_tools_reasoning_and_nulls_render_like_transformers(tokenizer_dirs: dict[str, Path]) -> None:
    ours, theirs = Tokenizer.open(tokenizer_dirs["thinking"]), AutoTokenizer.from_pretrained(tokenizer_dirs["thinking"])
    tools = [{"type": "function", "function": {"name": "né<e>", "parameters": {"b": 1, "a": [1.5, None, True]}}}]
    conversation = [
        CONVERSATION[0],
        {"role": "assistant", "content": "4", "thinking": "Two and two.", "tool_calls": None},
    ]
    assert ours.render(conversation, tools) == theirs.apply_chat_template(conversation, tools=tools, tokenize=False)
    assert "Two and two." in ours.render(conversation, tools)
    assert "né<e>" in ours.render(conversation, tools)


@pytest.mark.parametrize("name", NAMES)
def test_plain_text_is_encoded_and_decoded_like_transformers(name: str, tokenizer_dirs: dict[str, Path]) -> None:
    ours, theirs = Tokenizer.open(tokenizer_dirs[name]), AutoTokenizer.from_pretrained(tokenizer_dirs[name])
    for text in ("It is so: naïve café, 你好 😀", "", "  two  spaces\n"):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, special=True) == theirs.encode(text)
        assert ours.decode(theirs.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
        assert ours.decode(theirs.encode(text), special=True) == theirs.decode(theirs.encode(text))
    assert (ours.bos, ours.eos, ours.size) == (theirs.bos_token_id, theirs.eos_token_id, len(theirs))


def test_pad_is_its_own_token_or_eos_or_zero(tokenizer_dirs: dict[str, Path], tmp_path: Path) -> None:
    directory = shutil.copytree(tokenizer_dirs["chatml"], tmp_path / "folder")
    assert Tokenizer.open(directory).pad == Tokenizer.open(directory).eos
    (directory / "tokenizer_config.json").write_text('{"pad_token": "<|endoftext|>"}')
    assert (
        Tokenizer.open(directory).pad
        == AutoTokenizer.from_pretrained(tokenizer_dirs["chatml"]).encode("<|endoftext|>")[0]
    )
    (directory / "tokenizer_config.json").unlink()  # that of the padding in tokenizer.json
    assert Tokenizer.open(directory).pad == AutoTokenizer.from_pretrained(directory).pad_token_id
    assert Tokenizer.open(directory).eos is None


@pytest.mark.parametrize(("value", "stops"), [(3, {3}), ([3, 5], {3, 5}), (None, set())])
def test_stops_are_those_of_the_generation_config_and_eos(value, stops, tokenizer_dirs, tmp_path: Path) -> None:
    directory = shutil.copytree(tokenizer_dirs["chatml"], tmp_path / "folder")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    tokenizer = Tokenizer.open(directory)
    assert tokenizer.stops == stops | {tokenizer.eos}


def test_template_comes_from_a_file_a_list_or_the_config(tokenizer_dirs: dict[str, Path], tmp_path: Path) -> None:
    directory = shutil.copytree(tokenizer_dirs["chatml"], tmp_path / "folder")
    config = json.loads((directory / "tokenizer_config.json").read_text("utf-8"))
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with {{ tools[0].name }}"}]
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": templates}))
    for tools in (None, [{"name": "add"}]):
        theirs = AutoTokenizer.from_pretrained(directory).apply_chat_template(CONVERSATION, tools=tools, tokenize=False)
        assert Tokenizer.open(directory).render(CONVERSATION, tools) == theirs
    (directory / "chat_template.jinja").write_text("from a file")
    theirs = AutoTokenizer.from_pretrained(directory).apply_chat_template(CONVERSATION, tokenize=False)
    assert Tokenizer.open(directory).render(CONVERSATION) == theirs == "from a file"
    (tmp_path / "own.jinja").write_text("my own")
    assert Tokenizer.open(directory).with_template(str(tmp_path / "own.jinja")).render(CONVERSATION) == "my own"
    with pytest.raises(UserError, match="chat_template: 'missing.jinja' is not a file"):
        Tokenizer.open(directory).with_template("missing.jinja")


def test_templates_use_the_given_date(tokenizer_dirs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "day.jinja").write_text("{{ strftime_now('%d %b %Y') }}")
    tokenizer = Tokenizer.open(tokenizer_dirs["headers"]).with_date(date(2024, 2, 29))
    assert tokenizer.with_template(str(tmp_path / "day.jinja")).render(CONVERSATION) == "29 Feb 2024"


def test_legacy_special_tokens_map_is_read(tokenizer_dirs: dict[str, Path], tmp_path: Path) -> None:
    directory = shutil.copytree(tokenizer_dirs["headers"], tmp_path / "folder")
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (directory / "special_tokens_map.json").write_text(
        '{"bos_token": {"content": "<|begin|>"}, "eos_token": "<|eot_id|>"}'
    )
    ours, theirs = Tokenizer.open(directory), AutoTokenizer.from_pretrained(directory)
    assert (ours.bos, ours.eos) == (theirs.bos_token_id, theirs.eos_token_id)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_streamed_text_equals_decoded_text(tokenizer_dirs: dict[str, Path], text: str) -> None:
    for name in ("chatml", "turns"):
        tokenizer = Tokenizer.open(tokenizer_dirs[name]) if name not in TOKENIZERS else TOKENIZERS[name]
        TOKENIZERS[name] = tokenizer
        token_ids, stream = tokenizer.encode(text), TextStreamer(tokenizer)
        chunks = [stream.add(token) for token in token_ids]
        assert not any("\ufffd" in chunk for chunk in chunks) or "\ufffd" in text
        assert "".join(chunks) + stream.flush() == tokenizer.decode(token_ids)


TOKENIZERS: dict[str, Tokenizer] = {}


def test_streamer_waits_for_complete_characters(tokenizer_dirs: dict[str, Path]) -> None:
    tokenizer = Tokenizer.open(tokenizer_dirs["chatml"])
    token_ids = tokenizer.encode("🜁")
    assert len(token_ids) > 1
    stream = TextStreamer(tokenizer)
    assert [stream.add(token) for token in token_ids] == [""] * (len(token_ids) - 1) + ["🜁"]
    assert stream.add(token_ids[0]) == ""
    assert stream.flush() == "\ufffd"


@pytest.mark.parametrize(
    ("name", "text", "path"),
    [
        ("tokenizer.json", None, "tokenizer.json"),
        ("tokenizer.json", '{"model": ', "tokenizer.json"),
        ("tokenizer.json", '{"version": 1}', "tokenizer.json"),
        ("tokenizer.json", '{"model": {}}', "tokenizer.json"),
        ("tokenizer.json", '{"model": {"type": "BPE"}}', "tokenizer.json"),
        ("tokenizer.json", '{"model": {"type": "WordLevel", "vocab": {"a": 0}}, "added_tokens": 5}', "tokenizer.json"),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}', "tokenizer.json"),
        ("tokenizer_config.json", "[1]", "tokenizer_config.json"),
        ("generation_config.json", "{", "generation_config.json"),
    ],
)
def test_invalid_tokenizer_files_are_one_line_errors(name, text, path, tokenizer_dirs, tmp_path: Path) -> None:
    directory = shutil.copytree(tokenizer_dirs["chatml"], tmp_path / "folder")
    (directory / name).unlink(missing_ok=True)
    if text is not None:
        (directory / name).write_text(text)
    with pytest.raises(UserError, match=path) as error:
        Tokenizer.open(directory)
    assert "\n" not in str(error.value)
    assert str(directory) in str(error.value)


def test_tokenizer_with_more_tokens_than_the_model(tokenizer_dirs: dict[str, Path]) -> None:
    """Ordinary tokens beyond the vocabulary of the model are an error at once, added ones where they are used."""
    tokenizer = Tokenizer.open(tokenizer_dirs["chatml"])
    added = tokenizer.model.get_added_tokens_decoder()
    last = max(added)
    assert last == tokenizer.size - 1
    tokenizer.with_vocab_size(tokenizer.size + 50, "model").encode(added[last].content)
    with pytest.raises(UserError, match="model: .* [0-9]+ tokens.* 30"):
        tokenizer.with_vocab_size(30, "model")
    fitted = tokenizer.with_vocab_size(last, "model")
    assert fitted.encode("hello there") == tokenizer.encode("hello there")
    with pytest.raises(UserError) as error:
        fitted.encode(f"hello {added[last].content}")
    assert f"{added[last].content!r} (id {last})" in str(error.value)
