"""The nano's tokenizer, template and configuration, as the Hugging Face libraries see them."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, LlamaForCausalLM

from tunekit import assets
from tunekit.nano import corpus, tokenizer

FOLDER = assets.MODELS["tunekit/nano"]
WRITTEN = (
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "ü"}}}


@pytest.fixture(scope="module")
def theirs():
    return AutoTokenizer.from_pretrained(FOLDER)


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_any_text_survives(text):
    model = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    assert model.decode(model.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


def test_pieces(theirs):
    assert len(theirs) == tokenizer.VOCABULARY
    assert theirs.convert_tokens_to_ids(list(tokenizer.SPECIAL)) == list(range(len(tokenizer.SPECIAL)))
    assert theirs.tokenize("2026-08") == ["2", "0", "2", "6", "-", "0", "8"]
    assert theirs("Hello")["input_ids"][0] == theirs.bos_token_id == tokenizer.BEGIN
    assert (theirs.eos_token, theirs.pad_token, theirs.model_max_length) == ("<|turn|>", "<|pad|>", 1024)


def test_the_commands_write_the_same_files_again(tmp_path):
    corpus.write(tmp_path / "corpus", seed=5, text=400, chat=200)
    for name in ("one", "two"):
        tokenizer.write(tmp_path / "corpus", tmp_path / name)
    assert (tmp_path / "one" / "tokenizer.json").read_bytes() == (tmp_path / "two" / "tokenizer.json").read_bytes()
    for name in WRITTEN:
        assert (tmp_path / "one" / name).read_bytes() == (FOLDER / name).read_bytes()


@pytest.mark.slow
def test_the_tokenizer_is_the_one_of_the_whole_corpus(tmp_path):
    corpus.write(tmp_path, seed=0, text=corpus.TEXTS, chat=corpus.CHATS)
    again = tokenizer.train(tokenizer.texts(tmp_path))
    assert json.loads(again.to_str()) == json.loads((FOLDER / "tokenizer.json").read_text())


def test_the_configuration_opens():
    config = AutoConfig.from_pretrained(FOLDER)
    assert 2e6 < LlamaForCausalLM(config).num_parameters() < 6e6
    assert GenerationConfig.from_pretrained(FOLDER).eos_token_id == [tokenizer.TURN, tokenizer.END]


@pytest.mark.parametrize(
    ("messages", "options", "text"),
    [
        ([("user", "Hi")], {"add_generation_prompt": True}, "<|user|>Hi<|turn|><|assistant|>"),
        (
            [("user", "Hi"), ("assistant", "Hello!"), ("user", "Bye")],
            {},
            "<|user|>Hi<|turn|><|assistant|>Hello!<|turn|><|user|>Bye<|turn|>",
        ),
        ([("system", "Be kind."), ("user", " a ")], {}, "<|system|>Be kind.<|turn|><|user|> a <|turn|>"),
        (
            [("user", "Hi")],
            {"tools": [{"name": "add"}, {"name": "sub"}]},
            '<|system|>Tools:\n{"name": "add"}\n{"name": "sub"}<|turn|><|user|>Hi<|turn|>',
        ),
        (
            [("system", "S"), ("user", "Hi")],
            {"tools": [{"name": "add"}]},
            '<|system|>S\n\nTools:\n{"name": "add"}<|turn|><|user|>Hi<|turn|>',
        ),
        ([("user", "1?"), ("tool", "3")], {}, "<|user|>1?<|turn|><|tool|>3<|turn|>"),
    ],
)
def test_the_template(theirs, messages, options, text):
    turns = [{"role": role, "content": content} for role, content in messages]
    assert theirs.apply_chat_template(turns, tokenize=False, **options) == "<|begin|>" + text


@pytest.mark.parametrize("content", [None, "", "Wait."])
def test_the_template_writes_calls(theirs, content):
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": content, "tool_calls": [CALL, CALL]}]
    call = json.dumps(CALL["function"], ensure_ascii=False)
    said = "\n".join([*([content] if content else []), call, call])
    rendered = theirs.apply_chat_template(turns, tokenize=False)
    assert rendered == f"<|begin|><|user|>x<|turn|><|assistant|>{said}<|turn|>"
    ids = theirs.apply_chat_template(turns)["input_ids"]
    assert ids == theirs(rendered, add_special_tokens=False)["input_ids"]


def test_the_template_refuses_strange_roles(theirs):
    with pytest.raises(Exception, match="role judge cannot stand here"):
        theirs.apply_chat_template([{"role": "judge", "content": "x"}], tokenize=False)
