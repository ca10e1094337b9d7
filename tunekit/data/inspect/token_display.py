"""Tokens as text that can be read: special ones by name, white space and unprintable characters by signs."""

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from tunekit.data.tokenizer import UNFINISHED, Tokenizer

LONGEST = 6  # tokens that may be one character
JOINERS = "\u200c\u200d"  # invisible, but they belong to how the text is written
SIGNS = {"\n": "↵\n", "\t": "⇥", "\x7f": "␡", "\xa0": "⍽"}


class TokenRole(IntEnum):
    """What becomes of a token."""

    CONTEXT = 0  # read
    LEARNT = 1
    DROPPED = 2  # cut off


@dataclass(frozen=True)
class DisplayToken:
    """One token, or several that only together are a character. `at` is the place of the first."""

    at: int
    ids: tuple[int, ...]
    text: str
    state: TokenRole
    special: bool


def display_tokens(tokenizer: Tokenizer, tokens: Sequence[int], states: Sequence[int]) -> list[DisplayToken]:
    """Tokens of one document, none left out."""
    found, at = [], 0
    for ids, text, special in texts(tokenizer, tokens):
        found.append(DisplayToken(at, ids, text, TokenRole(states[at]), special))
        at += len(ids)
    return found


def texts(tokenizer: Tokenizer, tokens: Sequence[int]) -> Iterator[tuple[tuple[int, ...], str, bool]]:
    """Ids, what they say, and whether they are a special token."""
    added = {token: item.content for token, item in tokenizer.model.get_added_tokens_decoder().items()}
    held: list[int] = []
    before: list[int] = []
    for token in tokens:
        if token in added:
            if held:
                yield tuple(held), between(tokenizer, before, held), False
            yield (token,), added[token], token in tokenizer.marks
            held, before = [], [token]
            continue
        held.append(token)
        text = between(tokenizer, before, held)
        if (text and not text.endswith(UNFINISHED)) or len(held) == LONGEST:
            yield tuple(held), text, False
            held, before = [], held
    if held:
        yield tuple(held), between(tokenizer, before, held), False


def between(tokenizer: Tokenizer, before: list[int], held: list[int]) -> str:
    """What tokens add to the text: a decoder may treat the first token of all otherwise, so some stand before."""
    return tokenizer.decode(before + held, special=True)[len(tokenizer.decode(before, special=True)) :]


def visible(text: str, front: bool, back: bool) -> str:
    """A piece with its white space and unprintable characters as signs, where they would be overlooked.

    `front`, `back`: whether a space at that end matters, beside other white space, a special token, or a bound of what
    is learnt.
    """
    signed = "".join(map(sign, text))
    bare = signed.strip(" ")
    if not bare:
        return signed if len(signed) == 1 and not (front or back) else "·" * len(signed)
    left, right = len(signed) - len(signed.lstrip(" ")), len(signed) - len(signed.rstrip(" "))
    before = "·" * left if front or left > 1 else " " * left
    return before + bare.replace("  ", "··") + ("·" * right if back or right > 1 else " " * right)


def sign(character: str) -> str:
    """A character, or what stands for it. Nothing gets through that a terminal or a page would obey."""
    if character in SIGNS:
        return SIGNS[character]
    if character < " ":
        return chr(0x2400 + ord(character))
    kind = unicodedata.category(character)
    hidden = kind in ("Cc", "Cf", "Zl", "Zp", "Cs", "Cn", "Co") and character not in JOINERS
    return f"⟨U+{ord(character):04X}⟩" if hidden else character


def visible_text(parts: Sequence[DisplayToken]) -> list[str]:
    """The text of each piece, its white space visible where it matters."""
    pairs = zip((None, *parts), parts, (*parts[1:], None), strict=False)
    return [
        part.text if part.special else visible(part.text, bound(before, part, -1), bound(behind, part, 0))
        for before, part, behind in pairs
    ]


def bound(other: DisplayToken | None, part: DisplayToken, end: int) -> bool:
    """Whether white space matters between a piece and its neighbour, whose character at `end` is the nearest."""
    return (
        other is None or other.special or other.state is not part.state or other.text[end : end + 1 or None].isspace()
    )
