"""Texts as tokens, by pieces that come again and again: words, mostly. Several times as fast as the tokenizer alone.

A piece ends only where the tokenizer itself ends one, whatever stands around: at a special token, before a space
between a visible ASCII character and an ASCII letter, and behind a line break between such two. That a tokenizer does
so is not taken on trust: `Pieces.of` tries it with characters of every kind on both sides, and texts are compared, the
first ones all and later ones now and then.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, product
from typing import Protocol

import tokenizers

from tunekit.errors import UserError

TRIED = 64  # texts that are also encoded whole, and compared
SELDOM = 100  # one character in so many is also encoded whole later: about 5 % of the time
MOST, LONGEST = 2**17, 64  # pieces that are remembered, and the characters of one
WORD = r"(?<=[!-~])(?= [A-Za-z])|(?<=[!-~]\n)(?=[A-Za-z])"
KINDS = (
    "a",
    "Z",
    "s",
    "é",
    "\u0301",
    "中",
    "😀",
    "7",
    "٣",
    ".",
    "'",
    "-",
    "(",
    "_",
    ">",
    " ",
    "\n",
    "\r",
    "\t",
    "\u3000",
)
FEW = ("a", ".", "\n")
LEFT, RIGHT = "aZs7.'-(_>", ("a", "Z", "s", "t", "re")


class Encoded(Protocol):
    """What is asked of a text that has become tokens, as the tokenizers library calls it."""

    @property
    def ids(self) -> list[int]: ...

    def __len__(self) -> int: ...

    def char_to_token(self, char_pos: int) -> int | None: ...

    def token_to_chars(self, token_index: int) -> tuple[int, int] | None: ...


class Pieced:
    """A text whose pieces are encoded one by one. Where characters lie is found out only where it is asked."""

    def __init__(self, pieces: "Pieces", texts: list[str], ids: list[tuple[int, ...]]) -> None:
        self.pieces, self.texts = pieces, texts
        self.ids = list(chain.from_iterable(ids))
        self.starts = [0, *accumulate(map(len, texts))]
        self.firsts = [0, *accumulate(map(len, ids))]

    def __len__(self) -> int:
        return len(self.ids)

    def char_to_token(self, char_pos: int) -> int | None:
        index = bisect_right(self.starts, char_pos) - 1
        if index == len(self.texts):
            return None
        found = self.pieces.whole(self.texts[index]).char_to_token(char_pos - self.starts[index])
        return None if found is None else found + self.firsts[index]

    def token_to_chars(self, token_index: int) -> tuple[int, int] | None:
        index = bisect_right(self.firsts, token_index) - 1
        found = self.pieces.whole(self.texts[index]).token_to_chars(token_index - self.firsts[index])
        return None if found is None else (found[0] + self.starts[index], found[1] + self.starts[index])


class Pieces:
    """Encodes texts by pieces; whole, once that has given something else."""

    def __init__(self, model: tokenizers.Tokenizer, special: Sequence[str]) -> None:
        first = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
        self.model, self.cut = model, re.compile(f"({first})|{WORD}" if first else f"()(?!)|{WORD}")
        self.known: dict[str, tuple[int, ...]] = {}
        self.asked: dict[str, tokenizers.Encoding] = {}
        self.asked_size = 0  # characters
        self.tried, self.same = 0, True
        self.calls = self.since = 0  # characters that were not compared

    @staticmethod
    def of(model: tokenizers.Tokenizer) -> "Pieces | None":
        """None for a tokenizer that looks over the ends of pieces, or may do so."""
        told = json.loads(model.to_str())
        added = told["added_tokens"]
        strips = any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in added)
        spaced = any(not token["content"] or any(map(str.isspace, token["content"])) for token in added)
        normal = told["normalizer"] is None or told["normalizer"]["type"] == "NFC"
        words = told["model"].get("type") == "BPE" and not told["model"].get("dropout")
        if strips or spaced or not normal or not words or model.pre_tokenizer is None or not divides(model):
            return None
        return Pieces(model, [token["content"] for token in added if not token["normalized"]])

    def encode(self, texts: Sequence[str]) -> Sequence[Encoded]:
        """Tokens of each text."""
        if not self.same:
            return self.model.encode_batch(list(texts), add_special_tokens=False)
        found = self.pieced(texts)
        if self.tried < TRIED:
            self.tried += len(texts)
            whole = self.model.encode_batch(list(texts), add_special_tokens=False)
            self.same = all(one.ids == other.ids for one, other in zip(found, whole, strict=True))
            return whole
        self.watch(texts, found)
        return found

    def watch(self, texts: Sequence[str], found: Sequence[Encoded]) -> None:
        """Compare a text now and then. What was given before cannot be taken back, so a difference is an error."""
        self.calls, self.since = self.calls + 1, self.since + sum(map(len, texts))
        if not texts:
            return
        at = self.calls % len(texts)
        if self.since < SELDOM * len(texts[at]):
            return
        self.since = 0
        if self.model.encode(texts[at], add_special_tokens=False).ids != found[at].ids:
            raise UserError(
                f"the tokenizer reads words of a text that begins with {texts[at][:40]!r} otherwise alone than in it; "
                "set `workers: 0`, which encodes each row whole"
            )

    def pieced(self, texts: Sequence[str]) -> list[Pieced]:
        parts = [list(filter(None, self.cut.split(text))) for text in texts]
        missing = [part for part in set(chain.from_iterable(parts)) if part not in self.known]
        encodings = self.model.encode_batch(missing, add_special_tokens=False)
        self.known.update((part, tuple(one.ids)) for part, one in zip(missing, encodings, strict=True))
        found = [Pieced(self, part, [self.known[piece] for piece in part]) for part in parts]
        if len(self.known) > MOST:
            self.known.clear()
        for part in missing:
            if len(part) > LONGEST:
                self.known.pop(part, None)
        return found

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


def divides(model: tokenizers.Tokenizer) -> bool:
    """Whether words are found on both sides of an end of a piece as if there were no other side."""
    assert model.pre_tokenizer is not None
    words = model.pre_tokenizer.pre_tokenize_str
    alone = {text: [word for word, _ in words(text)] for pair in sides() for text in pair}
    return all([word for word, _ in words(left + right)] == alone[left] + alone[right] for left, right in sides())


def sides() -> Iterator[tuple[str, str]]:
    """Characters of every kind before and behind an end of a piece."""
    for before, left, right, after in chain(product(KINDS, LEFT, RIGHT, FEW), product(FEW, LEFT, RIGHT, KINDS)):
        yield before + left, f" {right}{after}"
        yield f"{before}{left}\n", right + after
