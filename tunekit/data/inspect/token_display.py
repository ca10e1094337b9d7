"""Readable text of tokens: special tokens by name, whitespace and unprintable characters as symbols."""

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from tunekit.data.tokenizer import TextStreamer, Tokenizer

MAX_TOKENS_PER_CHARACTER = 6
JOINERS = "\u200c\u200d"  # invisible, but part of the spelling
SYMBOLS = {"\n": "↵\n", "\t": "⇥", "\x7f": "␡", "\xa0": "⍽"}


class TokenRole(IntEnum):
    """How a token is used."""

    CONTEXT = 0
    TARGET = 1
    DROPPED = 2  # removed by truncation


@dataclass(frozen=True)
class DisplayToken:
    """One token, or several tokens that form one character. `index` is the position of the first."""

    index: int
    ids: tuple[int, ...]
    text: str
    role: TokenRole
    special: bool


def display_tokens(tokenizer: Tokenizer, tokens: Sequence[int], states: Sequence[int]) -> list[DisplayToken]:
    """Return all tokens of a document with their texts and roles."""
    display, index = [], 0
    for ids, text, special in decode_groups(tokenizer, tokens):
        display.append(DisplayToken(index, ids, text, TokenRole(states[index]), special))
        index += len(ids)
    return display


def decode_groups(tokenizer: Tokenizer, tokens: Sequence[int]) -> Iterator[tuple[tuple[int, ...], str, bool]]:
    """Yield groups of token ids, their text, and whether they are a special token."""
    added = {token: item.content for token, item in tokenizer.model.get_added_tokens_decoder().items()}
    streamer = TextStreamer(tokenizer, special=True)
    pending: list[int] = []
    for token in tokens:
        if token in added and pending:
            yield tuple(pending), streamer.flush(), False
            pending = []
        text = streamer.add(token)
        if token in added:
            streamer.flush()  # bytes that it may hold back do not belong to the next group
            yield (token,), added[token], token in tokenizer.special_ids
            continue
        pending.append(token)
        if text or len(pending) == MAX_TOKENS_PER_CHARACTER:
            yield tuple(pending), text or streamer.flush(), False
            pending = []
    if pending:
        yield tuple(pending), streamer.flush(), False


def show_whitespace(text: str, show_leading: bool, show_trailing: bool) -> str:
    """Replace unprintable characters, and spaces that are easily overlooked, by symbols.

    `show_leading`, `show_trailing`: replace a single space at that end too.
    """
    symbols = "".join(map(to_symbol, text))
    stripped = symbols.strip(" ")
    if not stripped:
        return symbols if len(symbols) == 1 and not (show_leading or show_trailing) else "·" * len(symbols)
    left, right = len(symbols) - len(symbols.lstrip(" ")), len(symbols) - len(symbols.rstrip(" "))
    leading = "·" * left if show_leading or left > 1 else " " * left
    return leading + stripped.replace("  ", "··") + ("·" * right if show_trailing or right > 1 else " " * right)


def to_symbol(character: str) -> str:
    """Return a character, or a symbol for one that would affect a terminal or a web page."""
    if character in SYMBOLS:
        return SYMBOLS[character]
    if character < " ":
        return chr(0x2400 + ord(character))
    category = unicodedata.category(character)
    is_invisible = category in ("Cc", "Cf", "Zl", "Zp", "Cs", "Cn", "Co") and character not in JOINERS
    return f"⟨U+{ord(character):04X}⟩" if is_invisible else character


def visible_text(tokens: Sequence[DisplayToken]) -> list[str]:
    """Return the text of each token, with symbols for spaces that are easily overlooked."""
    texts = []
    for previous, token, following in zip((None, *tokens), tokens, (*tokens[1:], None), strict=False):
        leading, trailing = is_space_significant(previous, token, -1), is_space_significant(following, token, 0)
        texts.append(token.text if token.special else show_whitespace(token.text, leading, trailing))
    return texts


def is_space_significant(neighbor: DisplayToken | None, token: DisplayToken, nearest: int) -> bool:
    """Whether a space between a token and its neighbor is easily overlooked.

    True at the ends of a text, next to special tokens and whitespace, and where the role changes. `nearest` is the
    index of the neighbor's character that is next to the token.
    """
    if neighbor is None or neighbor.special or neighbor.role is not token.role:
        return True
    return neighbor.text[nearest : nearest + 1 or None].isspace()
