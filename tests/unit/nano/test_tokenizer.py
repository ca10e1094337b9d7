"""Tokenizer, chat template, and configs of the bundled model in the Hugging Face libraries."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, LlamaForCausalLM

from scripts.nano import corpus, tokenizer
from tunekit import assets

MODEL_DIR = assets.MODELS["tunekit/nano"]
TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "ü"}}}


@pytest.fixture(scope="module")
def hf_tokenizer():
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def bundled_tokenizer():
    return Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_round_trip_is_lossless(bundled_tokenizer, text):
    model = bundled_tokenizer
    assert model.decode(model.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


def test_tokens_and_special_tokens(hf_tokenizer):
    assert len(hf_tokenizer) == tokenizer.VOCAB_SIZE
    assert hf_tokenizer.convert_tokens_to_ids(list(tokenizer.SPECIAL_TOKENS)) == list(
        range(len(tokenizer.SPECIAL_TOKENS))
    )
    assert hf_tokenizer.tokenize("2026-08") == ["2", "0", "2", "6", "-", "0", "8"]
    assert hf_tokenizer("Hello")["input_ids"][0] == hf_tokenizer.bos_token_id == tokenizer.BEGIN_ID
    assert (hf_tokenizer.eos_token, hf_tokenizer.pad_token, hf_tokenizer.model_max_length) == (
        "<|turn|>",
        "<|pad|>",
        1024,
    )


def test_model_files_are_reproducible(tmp_path):
    corpus.write_corpus(tmp_path / "corpus", seed=5, text=400, chat=200)
    for name in ("one", "two"):
        tokenizer.write_model_files(tmp_path / "corpus", tmp_path / name)
    assert (tmp_path / "one" / "tokenizer.json").read_bytes() == (tmp_path / "two" / "tokenizer.json").read_bytes()
    for name in TEXT_FILES:
        assert (tmp_path / "one" / name).read_bytes() == (MODEL_DIR / name).read_bytes()


def test_bundled_tokenizer_is_trained_on_the_corpus():
    """A tenth of the corpus gives 97% of its tokens, and all other settings."""
    counts = {"text": corpus.NUM_TEXTS // 10, "chat": corpus.NUM_CHATS // 10}
    rows = (row for kind, count in counts.items() for row in corpus.iter_rows(kind, count, f"0 {kind}", set()))
    retrained = json.loads(tokenizer.train_tokenizer(tokenizer.iter_row_texts(rows)).to_str())
    bundled = json.loads((MODEL_DIR / "tokenizer.json").read_text())
    tokens, retrained_tokens = (set(parts.pop("model")["vocab"]) for parts in (bundled, retrained))
    assert len(tokens & retrained_tokens) > 0.96 * len(tokens)
    assert bundled == retrained


def test_configs_load_in_transformers():
    config = AutoConfig.from_pretrained(MODEL_DIR)
    assert 2e6 < LlamaForCausalLM(config).num_parameters() < 6e6
    assert GenerationConfig.from_pretrained(MODEL_DIR).eos_token_id == [tokenizer.TURN_ID, tokenizer.END_ID]


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
def test_template(hf_tokenizer, messages, options, text):
    turns = [{"role": role, "content": content} for role, content in messages]
    assert hf_tokenizer.apply_chat_template(turns, tokenize=False, **options) == "<|begin|>" + text


@pytest.mark.parametrize("content", [None, "", "Wait."])
def test_template_renders_tool_calls(hf_tokenizer, content):
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": content, "tool_calls": [CALL, CALL]}]
    call = json.dumps(CALL["function"], ensure_ascii=False)
    content_and_calls = "\n".join([*([content] if content else []), call, call])
    rendered = hf_tokenizer.apply_chat_template(turns, tokenize=False)
    assert rendered == f"<|begin|><|user|>x<|turn|><|assistant|>{content_and_calls}<|turn|>"
    ids = hf_tokenizer.apply_chat_template(turns)["input_ids"]
    assert ids == hf_tokenizer(rendered, add_special_tokens=False)["input_ids"]


def test_template_rejects_unknown_roles(hf_tokenizer):
    with pytest.raises(Exception, match="role judge cannot stand here"):
        hf_tokenizer.apply_chat_template([{"role": "judge", "content": "x"}], tokenize=False)
