"""Tokens as text: nothing is lost, nothing gets through that a terminal would obey, and white space shows."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.conftest import SHAPES, write
from tunekit import assets
from tunekit.data.inspect.token_display import DisplayToken, TokenRole, display_tokens, sign, visible_text
from tunekit.data.tokenizer import Tokenizer

TEXTS = ["Hello there.", "naïve café, 你好, 😀!", "two  spaces\n\n  and lines\t.", " a", "", "😀😀 \u200b\x1b[31mred"]


@pytest.fixture(scope="module")
def nano() -> Tokenizer:
    folder = assets.model_dir("tunekit/nano")
    assert folder is not None
    return Tokenizer.open(folder)


def of(tokenizer: Tokenizer, text: str) -> list[DisplayToken]:
    ids = tokenizer.encode(text)
    return display_tokens(tokenizer, ids, [TokenRole.CONTEXT] * len(ids))


@given(st.text(max_size=60))
def test_pieces_are_the_text_and_hold_every_token_once(text: str) -> None:
    folder = assets.model_dir("tunekit/nano")
    assert folder is not None
    tokenizer = Tokenizer.open(folder)
    found = of(tokenizer, text)
    assert "".join(piece.text for piece in found) == text
    ids = [token for piece in found for token in piece.ids]
    assert ids == tokenizer.encode(text)
    assert [piece.at for piece in found] == [sum(len(one.ids) for one in found[:i]) for i in range(len(found))]


@pytest.mark.parametrize("shape", ["chatml", "turns", "brackets", "closed"])
def test_pieces_are_the_text_for_other_tokenizers(tmp_path: Path, shape: str) -> None:
    tokenizer = Tokenizer.open(write(tmp_path, SHAPES[shape]))
    mark = next(iter(tokenizer.marks.values()))
    text = f"{mark}user\nThe quick brown fox, 12 cafés: 你好 😀{mark}  so it is"
    found = of(tokenizer, text)
    assert "".join(piece.text for piece in found) == tokenizer.decode(tokenizer.encode(text), special=True)
    assert [piece.text for piece in found if piece.special] == [mark, mark]


def test_a_character_of_several_tokens_is_one_piece(nano: Tokenizer) -> None:
    (piece,) = of(nano, "😀")
    assert piece.text == "😀" and len(piece.ids) == len(nano.encode("😀")) > 1


def test_a_token_that_ends_within_a_character_is_shown_all_the_same(nano: Tokenizer) -> None:
    ids = nano.encode("😀")[:-1]
    found = display_tokens(nano, ids, [TokenRole.CONTEXT] * len(ids))
    assert [token for piece in found for token in piece.ids] == ids


@pytest.mark.parametrize("text", TEXTS)
def test_what_a_terminal_obeys_becomes_a_sign(nano: Tokenizer, text: str) -> None:
    lines = "".join(visible_text(of(nano, text)))
    assert not [character for character in lines if character != "\n" and sign(character) != character]


@given(st.characters())
def test_a_sign_is_no_other_sign(character: str) -> None:
    assert all(sign(one) == one for one in sign(character) if one != "\n")


def joined(*texts: str, states: tuple[TokenRole, ...] = (), special: tuple[int, ...] = ()) -> str:
    states = states or (TokenRole.CONTEXT,) * len(texts)
    parts = [DisplayToken(at, (at,), text, states[at], at in special) for at, text in enumerate(texts)]
    return "".join(visible_text(parts))


def test_spaces_show_where_they_would_be_overlooked() -> None:
    assert joined("a", " b", " ", "c") == "·".join(["a b c"]), "between words they are plain"
    assert joined(" a", " b") == "·a b", "at the beginning"
    assert joined("a", " b", " ") == "a b·", "at the end"
    assert joined("a", "  b") == "a··b", "two"
    assert joined("a", " ", " b") == "a··b", "two in two tokens"
    assert joined("a \n", " b") == "a ↵\n·b", "beside a line break"
    assert joined("<x>", " a ", "<x>", special=(0, 2)) == "<x>·a·<x>", "beside special tokens"
    learnt = (TokenRole.CONTEXT, TokenRole.CONTEXT, TokenRole.LEARNT, TokenRole.LEARNT)
    assert joined("a", " ", " b", " c", states=learnt) == "a··b c", "at the bound of what is learnt"
