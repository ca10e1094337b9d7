"""Exported tokenizers give the same ids, and tokenizers that llama.cpp would not reproduce are rejected."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import AddedToken, normalizers, pre_tokenizers

from tests.helpers.gguf_models import (
    SPECIAL_TOKENS,
    SUPPORTED,
    TEMPLATE,
    TEXT,
    make_checkpoint,
    regex_pre_tokenizer,
    write_byte_level_bpe,
    write_sentencepiece,
)
from tests.helpers.random_checkpoints import make_checkpoint as word_level_checkpoint
from tunekit.adapters.config import FrozenModel
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError
from tunekit.export.gguf_export import export_gguf
from tunekit.export.pretokenizer import GPT2, LLAMA3, PRE_TOKENIZERS
from tunekit.export.tokenizer import TEXTS, read_vocabulary
from tunekit.export.vocabulary import SentencePieceBPE, Vocabulary, merge_pairs

KEYS = gguf.Keys.Tokenizer
SIZE = 448


def read_back(directory: Path, shape: str = "qwen3") -> Vocabulary:
    """Vocabulary of an exported model with this tokenizer."""
    make_checkpoint(directory / "model", SUPPORTED[shape] | {"vocab_size": SIZE})
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (directory / name).replace(directory / "model" / name)
    out = directory / "model.gguf"
    tokenizer = Tokenizer.open(directory / "model")
    return Vocabulary.from_fields(
        export_gguf(HFCheckpoint.open(directory / "model"), FrozenModel(), tokenizer, out, None, "x").file.config
    )


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_pre_tokenizer_is_found_by_its_pattern(name: str, tmp_path: Path) -> None:
    write_byte_level_bpe(
        tmp_path, regex_pre_tokenizer(*PRE_TOKENIZERS[name].patterns), PRE_TOKENIZERS[name].ignore_merges
    )
    tokenizer = Tokenizer.open(tmp_path)
    vocabulary, _ = read_vocabulary(tokenizer, SIZE, "x")
    assert vocabulary.pre == name
    assert vocabulary.encode(TEXTS) == tokenizer.encode_texts(TEXTS)


@pytest.mark.parametrize(
    ("pre_tokenizer", "name"),
    [
        (pre_tokenizers.ByteLevel(add_prefix_space=False), "gpt-2"),
        (pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]), "smollm"),
    ],
)
def test_equivalent_pre_tokenizers(pre_tokenizer: Any, name: str, tmp_path: Path) -> None:
    assert read_vocabulary(Tokenizer.open(write_byte_level_bpe(tmp_path, pre_tokenizer)), SIZE, "x")[0].pre == name


def test_unknown_pattern_is_found_by_its_tokens(tmp_path: Path) -> None:
    """This one splits like Llama 3, with another regular expression."""
    tokenizer = Tokenizer.open(
        write_byte_level_bpe(tmp_path, regex_pre_tokenizer(LLAMA3.replace(r"\s+(?!\S)|\s+", r"\s+(?!\S)|\s{1,}")))
    )
    vocabulary, notes = read_vocabulary(tokenizer, SIZE, "x")
    assert vocabulary.pre in PRE_TOKENIZERS and notes == ()
    assert vocabulary.encode(TEXTS) == tokenizer.encode_texts(TEXTS)


def test_unsupported_pre_tokenizer_is_rejected(tmp_path: Path) -> None:
    """It keeps punctuation with the preceding word and does not group digits."""
    tokenizer = Tokenizer.open(write_byte_level_bpe(tmp_path, regex_pre_tokenizer(r"\S+\s*|\s+")))
    with pytest.raises(UserError, match=r"x: .*[\d,]+"):
        read_vocabulary(tokenizer, SIZE, "x")


def test_byte_level_bpe_round_trip(tmp_path: Path) -> None:
    write_byte_level_bpe(tmp_path, regex_pre_tokenizer(LLAMA3), normalizer=normalizers.NFC())
    tokenizer = Tokenizer.open(tmp_path)
    vocabulary = read_back(tmp_path)
    texts = [*TEXTS, "<begin>a <tool> b<turn>\n<end>", "<tool><tool>"]
    assert vocabulary.encode(texts) == tokenizer.encode_texts(texts)
    assert (vocabulary.model, vocabulary.pre) == ("gpt2", "dbrx")
    assert [vocabulary.tokens[i] for i in (0, 1, 2, 3)] == list(SPECIAL_TOKENS)
    kinds = {token: gguf.TokenType(kind).name for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)}
    assert kinds["<turn>"] == "CONTROL" and kinds["<tool>"] == "USER_DEFINED" and kinds["e"] == "NORMAL"
    assert kinds[f"[PAD{SIZE - 1}]"] == "UNUSED" and len(vocabulary.tokens) == SIZE
    assert vocabulary.extra_fields == {
        KEYS.BOS_ID: 1,
        KEYS.EOS_ID: 2,
        KEYS.EOT_ID: 3,  # generation_config.json ends answers with it too
        KEYS.PAD_ID: 0,
        KEYS.ADD_BOS: True,
        KEYS.ADD_EOS: False,
        KEYS.CHAT_TEMPLATE: TEMPLATE,
    }


@pytest.mark.parametrize("prefix", ["always", "never", "first"])
def test_sentencepiece_round_trip(prefix: str, tmp_path: Path) -> None:
    write_sentencepiece(tmp_path, prefix)
    tokenizer = Tokenizer.open(tmp_path)
    vocabulary = read_back(tmp_path)
    assert (vocabulary.model, vocabulary.space) == ("llama", prefix != "never")
    texts = [*TEXTS, *(line.strip() for line in TEXT), "\x00 🙂"]
    assert vocabulary.encode(texts) == tokenizer.encode_texts(texts)
    kinds = dict(zip(vocabulary.tokens, vocabulary.types, strict=True))
    assert kinds["<0x0A>"] == gguf.TokenType.BYTE and kinds["<turn>"] == gguf.TokenType.CONTROL
    assert vocabulary.scores is not None and vocabulary.merges is None


def test_differences_of_llama_cpp_are_noted(tmp_path: Path) -> None:
    """It adds a space to the start of a text and after special tokens, even if there already is one."""
    write_sentencepiece(tmp_path, "first")
    _, notes = read_vocabulary(Tokenizer.open(tmp_path), SIZE, "x")
    assert len(notes) == 2
    assert "' " in notes[0] and "'a<" in notes[1]


def test_best_pair_is_merged_first() -> None:
    scores = {"a": 0.0, "b": 0.0, "ab": -2.0, "ba": -1.0, "aba": -3.0}
    assert merge_pairs(list("abab"), scores) == ["aba", "b"]
    assert merge_pairs(list("aab"), scores) == ["a", "ab"]
    assert merge_pairs(list("aaaa"), {"aa": -1.0}) == ["aa", "aa"]
    tokens, types = ["<m>", "<0xC3>", "<0xA9>", *scores], [3, 6, 6, 1, 1, 1, 1, 1]
    bpe = SentencePieceBPE(tokens, types, [0.0] * 3 + [*scores.values()], add_space=False)
    assert bpe.encode("abé<m>a") == [5, 1, 2, 0, 3]


def test_added_tokens_without_text_are_normal(tmp_path: Path) -> None:
    """Gemma adds runs of the space symbol; only merges produce them from text."""
    write_sentencepiece(tmp_path, "never")
    path = tmp_path / "tokenizer.json"
    model = tokenizers.Tokenizer.from_file(str(path))
    model.add_tokens([AddedToken("\u2581\u2581", normalized=False), AddedToken("\n\n", normalized=False)])
    model.save(str(path))
    tokenizer = Tokenizer.open(tmp_path)
    vocabulary, notes = read_vocabulary(tokenizer, SIZE, "x")
    kinds = dict(zip(vocabulary.tokens, vocabulary.types, strict=True))
    assert kinds["\u2581\u2581"] == gguf.TokenType.NORMAL and kinds["\n\n"] == gguf.TokenType.USER_DEFINED
    assert vocabulary.encode(["a   b\n\n\nc"]) == tokenizer.encode_texts(["a   b\n\n\nc"]) and not notes


def test_named_templates(tmp_path: Path) -> None:
    write_byte_level_bpe(tmp_path, regex_pre_tokenizer(GPT2))
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (tmp_path / "chat_template.jinja").write_text("plain")
    fields = read_vocabulary(Tokenizer.open(tmp_path), SIZE, "x")[0].to_fields()
    assert fields[KEYS.CHAT_TEMPLATE] == "plain" and fields[KEYS.CHAT_TEMPLATE_N.format(name="tool_use")] == "tools"
    assert fields[KEYS.CHAT_TEMPLATES] == ["tool_use"]


def test_unsupported_stop_tokens_are_noted(tmp_path: Path) -> None:
    write_byte_level_bpe(tmp_path, regex_pre_tokenizer(GPT2))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3, 0, 1]}))
    vocabulary, notes = read_vocabulary(Tokenizer.open(tmp_path), SIZE, "x")
    assert (vocabulary.extra_fields[KEYS.EOT_ID], vocabulary.extra_fields[KEYS.EOM_ID]) == (0, 1)
    assert len(notes) == 1 and "<turn>" in notes[0]


def test_text_normalizer_is_rejected(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(
        write_byte_level_bpe(tmp_path, regex_pre_tokenizer(GPT2), normalizer=normalizers.Lowercase())
    )
    with pytest.raises(UserError, match="Lowercase"):
        read_vocabulary(tokenizer, SIZE, "x")


def test_other_tokenizers_and_sizes_are_rejected(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(word_level_checkpoint(tmp_path, "llama2"))
    with pytest.raises(UserError, match="WordLevel"):
        read_vocabulary(tokenizer, 67, "x")
    with pytest.raises(UserError, match="x: .*66.*66"):
        read_vocabulary(tokenizer, 66, "x")
