"""Tokens as text: no token is lost, control characters are made visible, and so is ambiguous white space."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.tokenizers import SHAPES, write_tokenizer
from tunekit import assets
from tunekit.data.inspect.token_display import DisplayToken, TokenRole, display_tokens, to_symbol, visible_text
from tunekit.data.tokenizer import Tokenizer

TEXTS = ["Hello there.", "naïve café, 你好, 😀!", "two  spaces\n\n  and lines\t.", " a", "", "😀😀 \u200b\x1b[31mred"]


@pytest.fixture(scope="module")
def nano() -> Tokenizer:
    folder = assets.model_dir("tunekit/nano")
    assert folder is not None
    return Tokenizer.open(folder)


def display(tokenizer: Tokenizer, text: str) -> list[DisplayToken]:
    token_ids = tokenizer.encode(text)
    return display_tokens(tokenizer, token_ids, [TokenRole.CONTEXT] * len(token_ids))


@given(st.text(max_size=60))
def test_display_tokens_join_to_the_text_with_every_token_once(text: str) -> None:
    folder = assets.model_dir("tunekit/nano")
    assert folder is not None
    tokenizer = Tokenizer.open(folder)
    pieces = display(tokenizer, text)
    assert "".join(piece.text for piece in pieces) == text
    token_ids = [token for piece in pieces for token in piece.ids]
    assert token_ids == tokenizer.encode(text)
    assert [piece.index for piece in pieces] == [
        sum(len(earlier.ids) for earlier in pieces[:i]) for i in range(len(pieces))
    ]


@pytest.mark.parametrize("shape", ["chatml", "turns", "brackets", "closed"])
def test_display_tokens_join_to_the_text_for_other_tokenizers(tmp_path: Path, shape: str) -> None:
    tokenizer = Tokenizer.open(write_tokenizer(tmp_path, SHAPES[shape]))
    special_text = next(iter(tokenizer.special_ids.values()))
    text = f"{special_text}user\nThe quick brown fox, 12 cafés: 你好 😀{special_text}  so it is"
    pieces = display(tokenizer, text)
    assert "".join(piece.text for piece in pieces) == tokenizer.decode(tokenizer.encode(text), special=True)
    assert [piece.text for piece in pieces if piece.special] == [special_text, special_text]


def test_character_of_several_tokens_is_one_display_token(nano: Tokenizer) -> None:
    (piece,) = display(nano, "😀")
    assert piece.text == "😀" and len(piece.ids) == len(nano.encode("😀")) > 1


def test_incomplete_character_is_shown(nano: Tokenizer) -> None:
    token_ids = nano.encode("😀")[:-1]
    pieces = display_tokens(nano, token_ids, [TokenRole.CONTEXT] * len(token_ids))
    assert [token for piece in pieces for token in piece.ids] == token_ids


@pytest.mark.parametrize("text", TEXTS)
def test_control_characters_are_replaced(nano: Tokenizer, text: str) -> None:
    lines = "".join(visible_text(display(nano, text)))
    assert not [character for character in lines if character != "\n" and to_symbol(character) != character]


@given(st.characters())
def test_replacement_is_not_replaced_again(character: str) -> None:
    assert all(to_symbol(shown) == shown for shown in to_symbol(character) if shown != "\n")


def join_visible(*texts: str, states: tuple[TokenRole, ...] = (), special: tuple[int, ...] = ()) -> str:
    states = states or (TokenRole.CONTEXT,) * len(texts)
    tokens = [DisplayToken(i, (i,), text, states[i], i in special) for i, text in enumerate(texts)]
    return "".join(visible_text(tokens))


def test_ambiguous_spaces_are_marked() -> None:
    assert join_visible("a", " b", " ", "c") == "·".join(["a b c"]), "unmarked between words"
    assert join_visible(" a", " b") == "·a b", "at the start"
    assert join_visible("a", " b", " ") == "a b·", "at the end"
    assert join_visible("a", "  b") == "a··b", "two in a token"
    assert join_visible("a", " ", " b") == "a··b", "two in two tokens"
    assert join_visible("a \n", " b") == "a ↵\n·b", "next to a line break"
    assert join_visible("<x>", " a ", "<x>", special=(0, 2)) == "<x>·a·<x>", "next to special tokens"
    roles = (TokenRole.CONTEXT, TokenRole.CONTEXT, TokenRole.TARGET, TokenRole.TARGET)
    assert join_visible("a", " ", " b", " c", states=roles) == "a··b c", "at the start of the targets"
