"""Texts as tokens, by pieces that come again and again: words, mostly. Many times as fast as the tokenizer alone.

A piece ends only where the tokenizer itself ends one, whatever stands around: at a special token, before a space
between two visible characters, and behind a line break between a visible character and an ASCII letter. That a
tokenizer does so is not taken on trust: `Pieces.of` tries it with characters of every kind on both sides, and texts are
compared, the first ones all and later ones now and then.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, product
from typing import NamedTuple, Protocol

import numpy as np
import tokenizers

from tunekit.errors import UserError

TRIED = 64  # texts that are also encoded whole, and compared
SELDOM = 100  # one character in so many is also encoded whole later: some 5 % of the time
MOST, LONGEST = 2**17, 64  # pieces that are remembered, and the characters of one
# The space before a word, the line break before a line: what stands around is looked at only where there is one.
WORD = re.compile(r" (?<=[!-~\w] )(?=[!-~\w])")
LINE = re.compile(r"\n(?<=[!-~\w]\n)(?=[A-Za-z])")
# Characters of every kind that tokenizers tell apart: what is visible in ASCII, and of other scripts.
ASCII = "".join(map(chr, range(0x21, 0x7F)))
LETTERS = "éßØǅªʰжЖαΩאعहกあカー中한𝒜𐐀𠀀ﬁ٣९²½Ⅷ"
KINDS = "aZsé\u0301中😀7٣.'-(_> \n\r\t\u3000\u200b।€"
FEW = "a.\n"
LEFT, RIGHT, LINED = "aZs7.'-(_>é中", ("a", "Z", "é", "7", ".", "'s", "re"), ("a", "Z", "s", "t", "re")


class TokenizerEncoding(Protocol):
    """What is asked of a text that has become tokens, as the tokenizers library calls it."""

    @property
    def ids(self) -> Sequence[int] | np.ndarray: ...

    def __len__(self) -> int: ...

    def char_to_token(self, char_pos: int) -> int | None: ...

    def token_to_chars(self, token_index: int) -> tuple[int, int] | None: ...


class TextPiece(NamedTuple):
    """A piece of `size` tokens, and how many characters and tokens of its text stand before it."""

    text: str
    size: int
    chars: int
    tokens: int


class PiecewiseEncoding:
    """A text in parts, whose pieces are encoded one by one. Where characters lie is found where it is asked."""

    def __init__(self, pieces: "TokenCache", parts: list[str], ids: list[bytes]) -> None:
        self.pieces, self.parts = pieces, parts
        self.ids = np.frombuffer(b"".join(ids), np.int32)
        self.starts = [0, *accumulate(map(len, parts))]
        self.firsts = [size // self.ids.itemsize for size in accumulate(map(len, ids), initial=0)]

    def __len__(self) -> int:
        return len(self.ids)

    def char_to_token(self, char_pos: int) -> int | None:
        if char_pos >= self.starts[-1]:
            return None
        part = bisect_right(self.starts, char_pos) - 1
        if self.single(part):
            return self.firsts[part]
        piece = next(piece for piece in self.walk(part) if char_pos < piece.chars + len(piece.text))
        found = self.pieces.whole(piece.text).char_to_token(char_pos - piece.chars)
        return None if found is None else found + piece.tokens

    def token_to_chars(self, token_index: int) -> tuple[int, int] | None:
        part = bisect_right(self.firsts, token_index) - 1
        if self.single(part):
            return self.starts[part], self.starts[part + 1]
        piece = next(piece for piece in self.walk(part) if token_index < piece.tokens + piece.size)
        found = self.pieces.whole(piece.text).token_to_chars(token_index - piece.tokens)
        return None if found is None else (found[0] + piece.chars, found[1] + piece.chars)

    def single(self, part: int) -> bool:
        """Whether a part is one token, as special ones are; beyond ASCII, some of its characters may be none's."""
        return self.firsts[part + 1] - self.firsts[part] == 1 and self.parts[part].isascii()

    def walk(self, part: int) -> Iterator[TextPiece]:
        """The pieces of a part, from its first on: what is asked lies at one of its ends, mostly at this one."""
        text, begin, tokens = self.parts[part], 0, self.firsts[part]
        for end in chain((space.start() for space in WORD.finditer(text)), [len(text)]):
            piece = text[begin:end]
            yield TextPiece(piece, size := self.pieces.size(piece), self.starts[part] + begin, tokens)
            begin, tokens = end, tokens + size


class TokenCache:
    """Encodes texts by pieces; whole, once that has given something else.

    What is known are the ids of parts that are one piece, and else of the heads that begin a part, of the tails that
    end one and of the words between; the last two without their space. They have come about at ends of pieces, so a
    part that falls at its spaces into these has such ends there.
    """

    def __init__(self, model: tokenizers.Tokenizer, special: Sequence[str]) -> None:
        longest = sorted(special, key=len, reverse=True)
        self.model, self.special = model, re.compile(f"({'|'.join(map(re.escape, longest)) or '(?!)'})")
        self.tables: tuple[dict[str, bytes], ...] = ({}, {}, {}, {})
        self.alone, self.heads, self.words, self.tails = self.tables
        self.asked: dict[str, tokenizers.Encoding] = {}
        self.asked_size = 0  # characters
        self.tried, self.same = 0, True
        self.calls = self.since = 0  # characters that were not compared

    @staticmethod
    def of(model: tokenizers.Tokenizer) -> "TokenCache | None":
        """None for a tokenizer that looks over the ends of pieces, or may do so."""
        told = json.loads(model.to_str())
        added = told["added_tokens"]
        strips = any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in added)
        spaced = any(not token["content"] or any(map(str.isspace, token["content"])) for token in added)
        normal = told["normalizer"] is None or told["normalizer"]["type"] == "NFC"
        words = told["model"].get("type") == "BPE" and not told["model"].get("dropout")
        if strips or spaced or not normal or not words or model.pre_tokenizer is None or not divides(model):
            return None
        return TokenCache(model, [token["content"] for token in added if not token["normalized"]])

    def encode(self, texts: Sequence[str]) -> Sequence[TokenizerEncoding]:
        """Tokens of each text."""
        if not self.same:
            return self.model.encode_batch(list(texts), add_special_tokens=False)
        found = [self.pieced(text) for text in texts]
        if self.tried < TRIED:
            self.tried += len(texts)
            whole = self.model.encode_batch(list(texts), add_special_tokens=False)
            self.same = all(one.ids.tolist() == other.ids for one, other in zip(found, whole, strict=True))
            return whole
        self.watch(texts, found)
        return found

    def watch(self, texts: Sequence[str], found: Sequence[PiecewiseEncoding]) -> None:
        """Compare a text now and then. What was given before cannot be taken back, so a difference is an error."""
        self.calls, self.since = self.calls + 1, self.since + sum(map(len, texts))
        if not texts:
            return
        at = self.calls % len(texts)
        if self.since < SELDOM * len(texts[at]):
            return
        self.since = 0
        if self.model.encode(texts[at], add_special_tokens=False).ids != found[at].ids.tolist():
            raise UserError(
                f"the tokenizer reads words of a text that begins with {texts[at][:40]!r} otherwise alone than in it; "
                "set `num_proc: 0`, which encodes each row whole"
            )

    def pieced(self, text: str) -> PiecewiseEncoding:
        parts = [line for part in self.special.split(text) if part for line in lines(part)]
        alone = self.alone.get
        return PiecewiseEncoding(self, parts, [alone(part) or self.known(part) or self.learnt(part) for part in parts])

    def known(self, part: str) -> bytes | None:
        """The ids of a part of several pieces. None if one is not known, or if a space in it is no end of a piece."""
        head, *words = part.split(" ")
        try:
            return b"".join([self.heads[head], *map(self.words.__getitem__, words[:-1]), self.tails[words[-1]]])
        except LookupError:
            return None

    def learnt(self, part: str) -> bytes:
        """The ids of a part, of which all pieces are known from then on."""
        names = WORD.split(part)
        texts = [names[0], *(f" {name}" for name in names[1:])]
        tables = [self.heads, *[self.words] * (len(names) - 2), self.tails] if len(names) > 1 else [self.alone]
        ids = [table.get(name) for table, name in zip(tables, names, strict=True)]
        new = [at for at, found in enumerate(ids) if found is None]
        encodings = self.model.encode_batch([texts[at] for at in new], add_special_tokens=False) if new else []
        for at, encoding in zip(new, encodings, strict=True):
            ids[at] = found = np.array(encoding.ids, np.int32).tobytes()
            if len(names[at]) <= LONGEST:
                tables[at][names[at]] = found
        if sum(map(len, self.tables)) > MOST:
            for table in self.tables:
                table.clear()
        return b"".join(filter(None, ids))

    def size(self, piece: str) -> int:
        """How many tokens a piece is."""
        known = self.words.get(piece[1:]) if piece[0] == " " else self.heads.get(piece)
        return len(self.whole(piece)) if known is None else len(known) // 4

    def whole(self, piece: str) -> tokenizers.Encoding:
        """A piece with its characters."""
        if piece not in self.asked:
            # Bounded by their characters: in Chinese a whole message is one piece, of some 100 bytes a token.
            if self.asked_size > MOST:
                self.asked.clear()
                self.asked_size = 0
            self.asked_size += len(piece)
            self.asked[piece] = self.model.encode(piece, add_special_tokens=False)
        return self.asked[piece]


def lines(part: str) -> list[str]:
    """A part as its lines, if it is long."""
    if len(part) <= LONGEST:
        return [part]
    *found, last = LINE.split(part)
    return [*(f"{line}\n" for line in found), last]


def divides(model: tokenizers.Tokenizer) -> bool:
    """Whether words are found on both sides of an end of a piece as if there were no other side."""
    assert model.pre_tokenizer is not None
    words = model.pre_tokenizer.pre_tokenize_str
    alone = {text: [word for word, _ in words(text)] for pair in sides() for text in pair}
    return all([word for word, _ in words(left + right)] == alone[left] + alone[right] for left, right in sides())


def sides() -> Iterator[tuple[str, str]]:
    """Characters of every kind before and behind an end of a piece."""
    for left, right in chain(product(ASCII, ASCII), product(LETTERS, RIGHT), product(LEFT, LETTERS)):
        yield left, f" {right}"
    for before, behind in chain(product(KINDS, FEW), product(FEW, KINDS)):
        for left, right in product(LEFT, RIGHT):
            yield before + left, f" {right}{behind}"
        for left, right in product(LEFT, LINED):
            yield f"{before}{left}\n", right + behind
