"""Texts that are encoded by pieces are, token by token and character by character, what the tokenizer makes of them."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Model

from tunekit.data.token_cache import LONGEST, MOST, TRIED, TokenCache
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError

# How tokenizers of Llama 3, Qwen 2 and GPT-4o find words; GPT-2's is that of the library itself.
SPLITS = {
    "three digits": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "one digit": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "cases": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
OVER = r"[a-z]+ [a-z]+|."  # words that go over a space
PARTS = (
    *(
        "a",
        "Hello",
        " the",
        " fox",
        "it's",
        " 'tis",
        "naïve",
        "e\u0301",
        " \u0301x",
        "你好",
        "😀",
        " ",
        "  ",
        "\n",
        "\n\n",
    ),
    *("\r\n", "\t", "\u3000", "12345", " 7", ".", ",", "...", "(", "_x", "<|im_end|>", "<|im_start|>", "<|im_"),
    *("\n a", "<|im_start|>user\nWhat", " \na", "a\nb", ".\nA", " - b", "DON'T", "x" * 70, " re", "\ud7ff", "\u2028"),
)


def model(folder: Path, split: str | None = None, normal: bool = False) -> Model:
    """The tokenizer of a folder, which finds words by another rule."""
    found = Tokenizer.open(folder).model
    if split is not None:
        byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        found.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), byte])
    if normal:
        found.normalizer = normalizers.NFC()
    return found


@pytest.fixture(scope="module")
def kinds(folders: dict[str, Path]) -> list[TokenCache]:
    plain = [model(folders["chatml"]), model(folders["thinking"], normal=True)]
    return [*map(tried, plain), *(tried(model(folders["chatml"], split, True)) for split in SPLITS.values())]


def tried(model: Model) -> TokenCache:
    """Pieces that no longer compare."""
    pieces = TokenCache.of(model)
    assert pieces is not None
    pieces.tried = TRIED
    return pieces


@settings(max_examples=100, deadline=None)
@given(texts=st.lists(st.lists(st.sampled_from(PARTS) | st.text(max_size=4), max_size=12).map("".join), max_size=4))
def test_pieces_give_the_same_tokens_at_the_same_characters(kinds: list[TokenCache], texts: list[str]) -> None:
    texts = [text.encode("utf-8", "ignore").decode() for text in texts]
    for pieces in kinds:
        whole = pieces.model.encode_batch(texts, add_special_tokens=False)
        for got, want in zip(pieces.encode(texts), whole, strict=True):
            assert list(got.ids) == want.ids
            assert len(got) == len(want)
            text = texts[0] if len(texts) == 1 else max(texts, key=len)
            assert [got.char_to_token(at) for at in range(len(text) + 2)] == [
                want.char_to_token(at) for at in range(len(text) + 2)
            ]
            assert [got.token_to_chars(at) for at in range(len(got))] == [
                want.token_to_chars(at) for at in range(len(want))
            ]


def test_what_began_a_text_is_no_word_behind_a_space(kinds: list[TokenCache]) -> None:
    before = ["<|im_end|> \u0301x", " \u0301x", "a b", "b\n", "a b\n", "a  c", "c"]
    behind = ["a \u0301x", "a b\n c", "b\n b", "a b  c", "a  b c", "a ", " a b", "a"]
    for pieces in kinds:
        pieces.encode(before)
        whole = pieces.model.encode_batch(behind, add_special_tokens=False)
        assert [found.ids.tolist() for found in map(pieces.pieced, behind)] == [one.ids for one in whole]


@pytest.mark.parametrize("name", ["turns", "brackets"])
def test_tokenizers_without_such_ends_are_left_alone(folders: dict[str, Path], name: str) -> None:
    assert TokenCache.of(model(folders[name])) is None


def test_whoever_looks_over_an_end_is_left_alone(folders: dict[str, Path]) -> None:
    folder = folders["chatml"]
    assert TokenCache.of(model(folder)) is not None
    assert TokenCache.of(model(folder, OVER)) is None, "words over spaces"
    assert TokenCache.of(model(folder, r"(?<=\n)a|\s+|\S+")) is None, "looks behind"
    one = model(folder)
    one.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert TokenCache.of(one) is None, "a space before each text"
    for token in (AddedToken("<x>", rstrip=True), AddedToken("<x>", lstrip=True), AddedToken("a b"), AddedToken("  ")):
        one = model(folder)
        one.add_tokens([token])
        assert TokenCache.of(one) is None, token
    one = model(folder)
    one.normalizer = normalizers.Lowercase()
    assert TokenCache.of(one) is None, "texts change first"
    assert TokenCache.of(Tokenizer.open(folders["closed"]).model) is None, (
        "an end token that takes the line break with it"
    )


def test_what_differs_once_is_not_used_again(folders: dict[str, Path]) -> None:
    pieces = TokenCache.of(model(folders["chatml"]))
    assert pieces is not None
    pieces.model = model(folders["chatml"], OVER)  # as if it had not been found out
    for _ in range(2):
        (got,) = pieces.encode(["hello there, hello there hello"])
        assert list(got.ids) == pieces.model.encode("hello there, hello there hello").ids
    assert not pieces.same


def test_what_differs_later_is_an_error(folders: dict[str, Path]) -> None:
    pieces = tried(model(folders["chatml"]))
    pieces.encode(["hello there " * 20])
    pieces.model = model(folders["chatml"], OVER)  # as if it had not been found out
    pieces.words.clear()
    with pytest.raises(UserError, match="otherwise alone than in it; set `num_proc: 0`"):
        for _ in range(1000):
            pieces.encode(["hello there, hello there hello"] * 2)


def test_long_pieces_whose_characters_are_asked_for_are_not_kept(folders: dict[str, Path]) -> None:
    pieces = tried(model(folders["chatml"]))
    for number in range(40):
        text = chr(0x4E00 + number) * 10_000  # no end of a piece in it
        (found,) = pieces.encode([text])
        assert found.char_to_token(0) == 0
        assert sum(map(len, pieces.asked)) <= MOST + len(text)


def encoded(pieces: TokenCache, text: str) -> bytes:
    return np.array(pieces.model.encode(text, add_special_tokens=False).ids, np.int32).tobytes()


def test_few_pieces_are_remembered(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = tried(model(folders["chatml"]))
    pieces.encode(["x" * (LONGEST + 1) + " a b", "c"])
    assert pieces.alone == {"c": encoded(pieces, "c")}
    assert (pieces.heads, pieces.words) == ({}, {"a": encoded(pieces, " a")})
    assert pieces.tails == {"b": encoded(pieces, " b")}
    monkeypatch.setattr("tunekit.data.token_cache.MOST", 100)
    for number in range(30):
        pieces.encode([" ".join("abcdefghij"[int(digit)] * 3 + "xyz"[number % 3] for digit in f"{number * 7919:08d}")])
        pieces.encode([f"a b{chr(97 + number % 26)}{chr(97 + number // 26)} " + " ".join(map(chr, range(97, 117)))])
        assert sum(map(len, pieces.tables)) <= 100
    assert MOST > 100
