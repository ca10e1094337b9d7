"""Tokenizers in files: the same ids after reading back, and no file for a tokenizer that llama.cpp would not follow."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import AddedToken, normalizers, pre_tokenizers

from tests.checkpoints import made as plain
from tests.export.exported import FITTING, MARKS, TEMPLATE, TEXT, made, split, write_bytes, write_pieces
from tunekit.adapters.config import FrozenModel
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError
from tunekit.export.gguf_export import export
from tunekit.export.pretokenizer import GPT2, LLAMA3, PRE
from tunekit.export.sentencepiece_bpe import SentencePieceBPE, join
from tunekit.export.tokenizer import TEXTS, read_vocabulary
from tunekit.export.vocabulary import Vocabulary

KEYS = gguf.Keys.Tokenizer
SIZE = 448


def read_back(folder: Path, shape: str = "qwen3") -> Vocabulary:
    """The vocabulary of a file that was written for a model with this tokenizer."""
    made(folder / "model", FITTING[shape] | {"vocab_size": SIZE})
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).replace(folder / "model" / name)
    out = folder / "model.gguf"
    tokenizer = Tokenizer.open(folder / "model")
    return Vocabulary.read(
        export(HFCheckpoint.open(folder / "model"), FrozenModel(), tokenizer, out, None, "x").file.config
    )


@pytest.mark.parametrize("name", PRE)
def test_every_way_to_cut_is_found_by_its_name(name: str, tmp_path: Path) -> None:
    write_bytes(tmp_path, split(*PRE[name].patterns), PRE[name].whole)
    tokenizer = Tokenizer.open(tmp_path)
    found, _ = read_vocabulary(tokenizer, SIZE, "x")
    assert found.pre == name
    assert found.encode(TEXTS) == tokenizer.encode_texts(TEXTS)


@pytest.mark.parametrize(
    ("pre", "name"),
    [
        (pre_tokenizers.ByteLevel(add_prefix_space=False), "gpt-2"),
        (pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]), "smollm"),
    ],
)
def test_other_words_for_the_same(pre: Any, name: str, tmp_path: Path) -> None:
    assert read_vocabulary(Tokenizer.open(write_bytes(tmp_path, pre)), SIZE, "x")[0].pre == name


def test_a_way_without_a_name_is_found_by_what_it_does(tmp_path: Path) -> None:
    """This one cuts as Llama 3 does, in other words."""
    tokenizer = Tokenizer.open(write_bytes(tmp_path, split(LLAMA3.replace(r"\s+(?!\S)|\s+", r"\s+(?!\S)|\s{1,}"))))
    found, notes = read_vocabulary(tokenizer, SIZE, "x")
    assert found.pre in PRE and notes == ()
    assert found.encode(TEXTS) == tokenizer.encode_texts(TEXTS)


def test_a_way_that_llama_cpp_does_not_have_is_refused(tmp_path: Path) -> None:
    """Of this one, words keep the sign before them and digits stand alone."""
    tokenizer = Tokenizer.open(write_bytes(tmp_path, split(r"\S+\s*|\s+")))
    with pytest.raises(
        UserError, match=r"x: the tokenizer cannot be written as GGUF: of [\d,]+ short texts llama.cpp "
    ):
        read_vocabulary(tokenizer, SIZE, "x")


def test_bytes_read_back(tmp_path: Path) -> None:
    write_bytes(tmp_path, split(LLAMA3), normalizer=normalizers.NFC())
    tokenizer = Tokenizer.open(tmp_path)
    found = read_back(tmp_path)
    texts = [*TEXTS, "<begin>a <tool> b<turn>\n<end>", "<tool><tool>"]
    assert found.encode(texts) == tokenizer.encode_texts(texts)
    assert (found.model, found.pre) == ("gpt2", "dbrx")
    assert [found.tokens[i] for i in (0, 1, 2, 3)] == list(MARKS)
    kinds = {token: gguf.TokenType(kind).name for token, kind in zip(found.tokens, found.types, strict=True)}
    assert kinds["<turn>"] == "CONTROL" and kinds["<tool>"] == "USER_DEFINED" and kinds["e"] == "NORMAL"
    assert kinds[f"[PAD{SIZE - 1}]"] == "UNUSED" and len(found.tokens) == SIZE
    assert found.rest == {
        KEYS.BOS_ID: 1,
        KEYS.EOS_ID: 2,
        KEYS.EOT_ID: 3,  # generation_config.json ends answers with it as well
        KEYS.PAD_ID: 0,
        KEYS.ADD_BOS: True,
        KEYS.ADD_EOS: False,
        KEYS.CHAT_TEMPLATE: TEMPLATE,
    }


@pytest.mark.parametrize("prefix", ["always", "never", "first"])
def test_pieces_read_back(prefix: str, tmp_path: Path) -> None:
    write_pieces(tmp_path, prefix)
    tokenizer = Tokenizer.open(tmp_path)
    found = read_back(tmp_path)
    assert (found.model, found.space) == ("llama", prefix != "never")
    texts = [*TEXTS, *(line.strip() for line in TEXT), "\x00 🙂"]
    assert found.encode(texts) == tokenizer.encode_texts(texts)
    kinds = dict(zip(found.tokens, found.types, strict=True))
    assert kinds["<0x0A>"] == gguf.TokenType.BYTE and kinds["<turn>"] == gguf.TokenType.CONTROL
    assert found.scores is not None and found.merges is None


def test_what_llama_cpp_reads_otherwise_is_said(tmp_path: Path) -> None:
    """It puts a space before every text and behind every mark, also where one is there already."""
    write_pieces(tmp_path, "first")
    _, notes = read_vocabulary(Tokenizer.open(tmp_path), SIZE, "x")
    assert len(notes) == 2
    assert notes[0].startswith("llama.cpp puts a space before a text also where one is there: ' ")
    assert notes[1].startswith("llama.cpp reads the text around special tokens otherwise: 'a<")


def test_the_best_pair_is_joined_first() -> None:
    scores = {"a": 0.0, "b": 0.0, "ab": -2.0, "ba": -1.0, "aba": -3.0}
    assert join(list("abab"), scores) == ["aba", "b"]
    assert join(list("aab"), scores) == ["a", "ab"]
    assert join(list("aaaa"), {"aa": -1.0}) == ["aa", "aa"]
    tokens, types = ["<m>", "<0xC3>", "<0xA9>", *scores], [3, 6, 6, 1, 1, 1, 1, 1]
    pieces = SentencePieceBPE(tokens, types, [0.0] * 3 + [*scores.values()], space=False)
    assert pieces.encode("abé<m>a") == [5, 1, 2, 0, 3]


def test_tokens_that_no_text_holds_are_plain(tmp_path: Path) -> None:
    """Gemma adds runs of the sign that stands for a space; only the merges make them of spaces."""
    write_pieces(tmp_path, "never")
    file = tmp_path / "tokenizer.json"
    model = tokenizers.Tokenizer.from_file(str(file))
    model.add_tokens([AddedToken("\u2581\u2581", normalized=False), AddedToken("\n\n", normalized=False)])
    model.save(str(file))
    tokenizer = Tokenizer.open(tmp_path)
    found, notes = read_vocabulary(tokenizer, SIZE, "x")
    kinds = dict(zip(found.tokens, found.types, strict=True))
    assert kinds["\u2581\u2581"] == gguf.TokenType.NORMAL and kinds["\n\n"] == gguf.TokenType.USER_DEFINED
    assert found.encode(["a   b\n\n\nc"]) == tokenizer.encode_texts(["a   b\n\n\nc"]) and not notes


def test_templates_by_name(tmp_path: Path) -> None:
    write_bytes(tmp_path, split(GPT2))
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (tmp_path / "chat_template.jinja").write_text("plain")
    said = read_vocabulary(Tokenizer.open(tmp_path), SIZE, "x")[0].said()
    assert said[KEYS.CHAT_TEMPLATE] == "plain" and said[KEYS.CHAT_TEMPLATE_N.format(name="tool_use")] == "tools"
    assert said[KEYS.CHAT_TEMPLATES] == ["tool_use"]


def test_ends_for_which_there_is_no_room_are_named(tmp_path: Path) -> None:
    write_bytes(tmp_path, split(GPT2))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3, 0, 1]}))
    found, notes = read_vocabulary(Tokenizer.open(tmp_path), SIZE, "x")
    assert (found.rest[KEYS.EOT_ID], found.rest[KEYS.EOM_ID]) == (0, 1)
    assert notes == ("llama.cpp does not end an answer at <turn>",)


def test_a_tokenizer_that_changes_the_text_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(write_bytes(tmp_path, split(GPT2), normalizer=normalizers.Lowercase()))
    with pytest.raises(UserError, match=r"does not change a text before it cuts it; this tokenizer does \(Lowercase\)"):
        read_vocabulary(tokenizer, SIZE, "x")


def test_other_kinds_and_other_sizes_are_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(plain(tmp_path, "llama2"))
    with pytest.raises(UserError, match="a WordLevel tokenizer cannot be written as GGUF; byte-level BPE and "):
        read_vocabulary(tokenizer, 67, "x")
    with pytest.raises(UserError, match="x: the tokenizer has ids up to 66, and the model 66 embeddings"):
        read_vocabulary(tokenizer, 66, "x")
