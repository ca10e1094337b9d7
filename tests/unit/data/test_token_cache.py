"""The token cache gives the same tokens and character offsets as the tokenizer."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Model

from tunekit.data.token_cache import MAX_PIECE_CHARS, MAX_PIECES, NUM_VERIFIED, TokenCache
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError

# Pre-tokenizer patterns of Llama 3, Qwen 2 and GPT-4o; that of GPT-2 is built into the library.
SPLITS = {
    "three digits": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "one digit": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "cases": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
WORDS_WITH_SPACES = r"[a-z]+ [a-z]+|."  # words that contain spaces
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


def open_model(directory: Path, split: str | None = None, nfc: bool = False) -> Model:
    """Copy the tokenizer of a directory and replace its pre-tokenizer and normalizer."""
    model = Model.from_str(Tokenizer.open(directory).model.to_str())
    if split is not None:
        byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        model.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), byte])
    if nfc:
        model.normalizer = normalizers.NFC()
    return model


@pytest.fixture(scope="module")
def caches(tokenizer_dirs: dict[str, Path]) -> list[TokenCache]:
    unsplit = [open_model(tokenizer_dirs["chatml"]), open_model(tokenizer_dirs["thinking"], nfc=True)]
    return [
        *map(trusted_cache, unsplit),
        *(trusted_cache(open_model(tokenizer_dirs["chatml"], split, True)) for split in SPLITS.values()),
    ]


def trusted_cache(model: Model) -> TokenCache:
    """Build a cache that no longer compares its results with the tokenizer."""
    cache = TokenCache.from_model(model)
    assert cache is not None
    cache.num_verified = NUM_VERIFIED
    return cache


@settings(max_examples=100, deadline=None)
@given(texts=st.lists(st.lists(st.sampled_from(PARTS) | st.text(max_size=4), max_size=12).map("".join), max_size=4))
def test_cache_gives_the_same_tokens_and_offsets(caches: list[TokenCache], texts: list[str]) -> None:
    texts = [text.encode("utf-8", "ignore").decode() for text in texts]
    for cache in caches:
        expected = cache.model.encode_batch(texts, add_special_tokens=False)
        for result, encoding in zip(cache.encode(texts), expected, strict=True):
            assert list(result.ids) == encoding.ids
            assert len(result) == len(encoding)
            text = texts[0] if len(texts) == 1 else max(texts, key=len)
            assert [result.char_to_token(i) for i in range(len(text) + 2)] == [
                encoding.char_to_token(i) for i in range(len(text) + 2)
            ]
            assert [result.token_to_chars(i) for i in range(len(result))] == [
                encoding.token_to_chars(i) for i in range(len(encoding))
            ]


def test_cached_start_of_text_is_not_used_after_a_space(caches: list[TokenCache]) -> None:
    earlier = ["<|im_end|> \u0301x", " \u0301x", "a b", "b\n", "a b\n", "a  c", "c"]
    later = ["a \u0301x", "a b\n c", "b\n b", "a b  c", "a  b c", "a ", " a b", "a"]
    for cache in caches:
        cache.encode(earlier)
        expected = cache.model.encode_batch(later, add_special_tokens=False)
        assert [result.ids.tolist() for result in map(cache.encode_pieces, later)] == [
            encoding.ids for encoding in expected
        ]


@pytest.mark.parametrize("name", ["turns", "brackets"])
def test_tokenizer_without_word_boundaries_has_no_cache(tokenizer_dirs: dict[str, Path], name: str) -> None:
    assert TokenCache.from_model(open_model(tokenizer_dirs[name])) is None


def test_tokenizer_with_context_across_words_has_no_cache(tokenizer_dirs: dict[str, Path]) -> None:
    directory = tokenizer_dirs["chatml"]
    assert TokenCache.from_model(open_model(directory)) is not None
    assert TokenCache.from_model(open_model(directory, WORDS_WITH_SPACES)) is None, "words over spaces"
    assert TokenCache.from_model(open_model(directory, r"(?<=\n)a|\s+|\S+")) is None, "lookbehind"
    changed = open_model(directory)
    changed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert TokenCache.from_model(changed) is None, "a space before each text"
    for token in (AddedToken("<x>", rstrip=True), AddedToken("<x>", lstrip=True), AddedToken("a b"), AddedToken("  ")):
        changed = open_model(directory)
        changed.add_tokens([token])
        assert TokenCache.from_model(changed) is None, token
    changed = open_model(directory)
    changed.normalizer = normalizers.Lowercase()
    assert TokenCache.from_model(changed) is None, "texts change first"
    assert TokenCache.from_model(Tokenizer.open(tokenizer_dirs["closed"]).model) is None, (
        "an end token that strips the line break"
    )


def test_cache_is_disabled_after_a_difference(tokenizer_dirs: dict[str, Path]) -> None:
    cache = TokenCache.from_model(open_model(tokenizer_dirs["chatml"]))
    assert cache is not None
    cache.model = open_model(tokenizer_dirs["chatml"], WORDS_WITH_SPACES)  # not detected when the cache was built
    for _ in range(2):
        (result,) = cache.encode(["hello there, hello there hello"])
        assert list(result.ids) == cache.model.encode("hello there, hello there hello").ids
    assert not cache.is_valid


def test_later_difference_is_an_error(tokenizer_dirs: dict[str, Path]) -> None:
    cache = trusted_cache(open_model(tokenizer_dirs["chatml"]))
    cache.encode(["hello there " * 20])
    cache.model = open_model(tokenizer_dirs["chatml"], WORDS_WITH_SPACES)  # not detected when the cache was built
    cache.middle_pieces.clear()
    with pytest.raises(UserError, match="num_proc"):
        for _ in range(1000):
            cache.encode(["hello there, hello there hello"] * 2)


def test_offsets_of_long_pieces_are_not_cached(tokenizer_dirs: dict[str, Path]) -> None:
    cache = trusted_cache(open_model(tokenizer_dirs["chatml"]))
    for number in range(40):
        text = chr(0x4E00 + number) * 10_000  # one piece
        (result,) = cache.encode([text])
        assert result.char_to_token(0) == 0
        assert sum(map(len, cache.encodings)) <= MAX_PIECES + len(text)


def token_bytes(cache: TokenCache, text: str) -> bytes:
    return np.array(cache.model.encode(text, add_special_tokens=False).ids, np.int32).tobytes()


def test_cache_size_is_limited(tokenizer_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    cache = trusted_cache(open_model(tokenizer_dirs["chatml"]))
    cache.encode(["x" * (MAX_PIECE_CHARS + 1) + " a b", "c"])
    assert cache.single_pieces == {"c": token_bytes(cache, "c")}
    assert (cache.first_pieces, cache.middle_pieces) == ({}, {"a": token_bytes(cache, " a")})
    assert cache.last_pieces == {"b": token_bytes(cache, " b")}
    monkeypatch.setattr("tunekit.data.token_cache.MAX_PIECES", 100)
    for number in range(30):
        cache.encode([" ".join("abcdefghij"[int(digit)] * 3 + "xyz"[number % 3] for digit in f"{number * 7919:08d}")])
        cache.encode([f"a b{chr(97 + number % 26)}{chr(97 + number // 26)} " + " ".join(map(chr, range(97, 117)))])
        assert sum(map(len, cache.tables)) <= 100
    assert MAX_PIECES > 100
