"""Fast tokenization with a cache of the token ids of text pieces, mostly words. Many times faster than the tokenizer.

Pieces end only where the tokenizer itself splits text, regardless of context: at a special token, before a space
between two visible characters, and after a line break between a visible character and an ASCII letter. This is
verified: `TokenCache.from_model` tests the split points with characters of all kinds on both sides, and the results are
compared with those of the tokenizer, for all of the first texts and for a sample of the later ones.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, product
from typing import NamedTuple, Protocol

import numpy as np
import tokenizers

from tunekit.errors import UserError

NUM_VERIFIED = 64  # first texts that are also encoded by the tokenizer, and compared
VERIFY_INTERVAL = 100  # later, one in this many characters is verified: about 5 % of the time
MAX_PIECES, MAX_PIECE_CHARS = 2**17, 64  # cached pieces; characters of a cached piece
# The space before a word, the line break before a line. The context is in lookarounds, which only run on a match.
WORD = re.compile(r" (?<=[!-~\w] )(?=[!-~\w])")
LINE = re.compile(r"\n(?<=[!-~\w]\n)(?=[A-Za-z])")
# Characters of all kinds that tokenizers distinguish: visible ASCII, and other scripts.
ASCII = "".join(map(chr, range(0x21, 0x7F)))
LETTERS = "éßØǅªʰжЖαΩאعहกあカー中한𝒜𐐀𠀀ﬁ٣९²½Ⅷ"
CHAR_KINDS = "aZsé\u0301中😀7٣.'-(_> \n\r\t\u3000\u200b।€"
COMMON_CHARS = "a.\n"
LEFT, RIGHT, LINED = "aZs7.'-(_>é中", ("a", "Z", "é", "7", ".", "'s", "re"), ("a", "Z", "s", "t", "re")


class TokenizerEncoding(Protocol):
    """Tokens of a text, with the interface of `tokenizers.Encoding`."""

    @property
    def ids(self) -> Sequence[int] | np.ndarray: ...

    def __len__(self) -> int: ...

    def char_to_token(self, char_pos: int) -> int | None: ...

    def token_to_chars(self, token_index: int) -> tuple[int, int] | None: ...


class TextPiece(NamedTuple):
    """A piece of `size` tokens, and its start in the text in characters and in tokens."""

    text: str
    size: int
    char_start: int
    token_start: int


class PiecewiseEncoding:
    """Encoding of a text in segments (lines and special tokens) of pieces. Offsets are only computed when needed."""

    def __init__(self, cache: "TokenCache", segments: list[str], ids: list[bytes]) -> None:
        self.cache, self.segments = cache, segments
        self.ids = np.frombuffer(b"".join(ids), np.int32)
        self.char_starts = [0, *accumulate(map(len, segments))]
        self.token_starts = [size // self.ids.itemsize for size in accumulate(map(len, ids), initial=0)]

    def __len__(self) -> int:
        return len(self.ids)

    def char_to_token(self, char_pos: int) -> int | None:
        """Token of a character."""
        if char_pos >= self.char_starts[-1]:
            return None
        segment = bisect_right(self.char_starts, char_pos) - 1
        if self.is_single_token(segment):
            return self.token_starts[segment]
        piece = next(p for p in self.iter_pieces(segment) if char_pos < p.char_start + len(p.text))
        token = self.cache.encode_piece(piece.text).char_to_token(char_pos - piece.char_start)
        return None if token is None else token + piece.token_start

    def token_to_chars(self, token_index: int) -> tuple[int, int] | None:
        """Start and end characters of a token."""
        segment = bisect_right(self.token_starts, token_index) - 1
        if self.is_single_token(segment):
            return self.char_starts[segment], self.char_starts[segment + 1]
        piece = next(p for p in self.iter_pieces(segment) if token_index < p.token_start + p.size)
        chars = self.cache.encode_piece(piece.text).token_to_chars(token_index - piece.token_start)
        return None if chars is None else (chars[0] + piece.char_start, chars[1] + piece.char_start)

    def is_single_token(self, segment: int) -> bool:
        """Whether a segment is one ASCII token, such as a special token. Others may have characters of no token."""
        return self.token_starts[segment + 1] - self.token_starts[segment] == 1 and self.segments[segment].isascii()

    def iter_pieces(self, segment: int) -> Iterator[TextPiece]:
        """Pieces of a segment. Queries are mostly for its first ones."""
        text, start, token_start = self.segments[segment], 0, self.token_starts[segment]
        for end in chain((space.start() for space in WORD.finditer(text)), [len(text)]):
            piece = text[start:end]
            yield TextPiece(piece, size := self.cache.num_tokens(piece), self.char_starts[segment] + start, token_start)
            start, token_start = end, token_start + size


class TokenCache:
    """Encodes texts by pieces, or with the tokenizer after a comparison of both has failed.

    There are four tables of token ids: of segments that are one piece, of first pieces of a segment, of middle pieces,
    and of last pieces; middle and last pieces are stored without their leading space. All of them were split at valid
    split points, so a segment whose parts between spaces are in the tables has these split points.
    """

    def __init__(self, model: tokenizers.Tokenizer, special: Sequence[str]) -> None:
        self.model, self.special = model, compile_alternation(special)
        self.tables: tuple[dict[str, bytes], ...] = ({}, {}, {}, {})
        self.single_pieces, self.first_pieces, self.middle_pieces, self.last_pieces = self.tables
        self.encodings: dict[str, tokenizers.Encoding] = {}
        self.encoding_chars = 0
        self.num_verified, self.is_valid = 0, True
        self.num_calls = self.unverified_chars = 0

    @staticmethod
    def from_model(model: tokenizers.Tokenizer) -> "TokenCache | None":
        """Cache for a tokenizer; None if the tokenizer may split text differently depending on context."""
        config = json.loads(model.to_str())
        added = config["added_tokens"]
        strips = any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in added)
        has_space = any(not token["content"] or any(map(str.isspace, token["content"])) for token in added)
        keeps_text = config["normalizer"] is None or config["normalizer"]["type"] == "NFC"
        is_bpe = config["model"].get("type") == "BPE" and not config["model"].get("dropout")
        if strips or has_space or not keeps_text or not is_bpe or model.pre_tokenizer is None:
            return None
        if not splits_at_pieces(model):
            return None
        return TokenCache(model, [token["content"] for token in added if not token["normalized"]])

    def encode(self, texts: Sequence[str]) -> Sequence[TokenizerEncoding]:
        """Tokens of each text."""
        if not self.is_valid:
            return self.model.encode_batch(list(texts), add_special_tokens=False)
        encodings = [self.encode_pieces(text) for text in texts]
        if self.num_verified < NUM_VERIFIED:
            self.num_verified += len(texts)
            expected = self.model.encode_batch(list(texts), add_special_tokens=False)
            self.is_valid = all(a.ids.tolist() == b.ids for a, b in zip(encodings, expected, strict=True))
            return expected
        self.verify_sample(texts, encodings)
        return encodings

    def verify_sample(self, texts: Sequence[str], encodings: Sequence[PiecewiseEncoding]) -> None:
        """Compare a text from time to time. Earlier results cannot be changed, so a difference is an error."""
        self.num_calls, self.unverified_chars = self.num_calls + 1, self.unverified_chars + sum(map(len, texts))
        if not texts:
            return
        i = self.num_calls % len(texts)
        if self.unverified_chars < VERIFY_INTERVAL * len(texts[i]):
            return
        self.unverified_chars = 0
        if self.model.encode(texts[i], add_special_tokens=False).ids != encodings[i].ids.tolist():
            raise UserError(
                f"the tokenizer splits words depending on context, in the text that begins with {texts[i][:40]!r}. "
                "Set `num_proc: 0`, which disables the token cache"
            )

    def encode_pieces(self, text: str) -> PiecewiseEncoding:
        """Encode a text by segments and pieces."""
        segments = [line for part in self.special.split(text) if part for line in split_lines(part)]
        single = self.single_pieces.get
        ids = [single(segment) or self.cached_ids(segment) or self.add_segment(segment) for segment in segments]
        return PiecewiseEncoding(self, segments, ids)

    def cached_ids(self, segment: str) -> bytes | None:
        """Ids of a segment of several pieces; None if one is not cached, or if a space in it is no split point."""
        first, *words = segment.split(" ")
        try:
            middle = map(self.middle_pieces.__getitem__, words[:-1])
            return b"".join([self.first_pieces[first], *middle, self.last_pieces[words[-1]]])
        except LookupError:
            return None

    def add_segment(self, segment: str) -> bytes:
        """Encode a segment, and add its pieces to the cache."""
        keys = WORD.split(segment)
        texts = [keys[0], *(f" {key}" for key in keys[1:])]
        tables = [self.single_pieces]
        if len(keys) > 1:
            tables = [self.first_pieces, *[self.middle_pieces] * (len(keys) - 2), self.last_pieces]
        ids = [table.get(key) for table, key in zip(tables, keys, strict=True)]
        missing = [i for i, piece_ids in enumerate(ids) if piece_ids is None]
        encodings = self.model.encode_batch([texts[i] for i in missing], add_special_tokens=False) if missing else []
        for i, encoding in zip(missing, encodings, strict=True):
            ids[i] = piece_ids = np.array(encoding.ids, np.int32).tobytes()
            if len(keys[i]) <= MAX_PIECE_CHARS:
                tables[i][keys[i]] = piece_ids
        if sum(map(len, self.tables)) > MAX_PIECES:
            for table in self.tables:
                table.clear()
        return b"".join(filter(None, ids))

    def num_tokens(self, piece: str) -> int:
        """Number of tokens of a piece."""
        ids = self.middle_pieces.get(piece[1:]) if piece[0] == " " else self.first_pieces.get(piece)
        return len(self.encode_piece(piece)) if ids is None else len(ids) // 4

    def encode_piece(self, piece: str) -> tokenizers.Encoding:
        """Encoding of a piece, with character offsets. Cached."""
        if piece not in self.encodings:
            # Limited by characters: in Chinese, a full message is one piece, with some 100 bytes per token.
            if self.encoding_chars > MAX_PIECES:
                self.encodings.clear()
                self.encoding_chars = 0
            self.encoding_chars += len(piece)
            self.encodings[piece] = self.model.encode(piece, add_special_tokens=False)
        return self.encodings[piece]


def compile_alternation(texts: Iterable[str]) -> re.Pattern[str]:
    """Pattern, with one group, that matches any of some texts, the longest possible one."""
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def split_lines(text: str) -> list[str]:
    """Split a long text into lines."""
    if len(text) <= MAX_PIECE_CHARS:
        return [text]
    *lines, last = LINE.split(text)
    return [*(f"{line}\n" for line in lines), last]


def splits_at_pieces(model: tokenizers.Tokenizer) -> bool:
    """Whether the pre-tokenizer splits both sides of a split point as if the other side did not exist."""
    assert model.pre_tokenizer is not None
    split = model.pre_tokenizer.pre_tokenize_str
    alone = {text: [word for word, _ in split(text)] for pair in split_point_samples() for text in pair}
    return all(
        [word for word, _ in split(left + right)] == alone[left] + alone[right] for left, right in split_point_samples()
    )


def split_point_samples() -> Iterator[tuple[str, str]]:
    """Texts before and after a split point, with characters of all kinds."""
    for left, right in chain(product(ASCII, ASCII), product(LETTERS, RIGHT), product(LEFT, LETTERS)):
        yield left, f" {right}"
    for before, after in chain(product(CHAR_KINDS, COMMON_CHARS), product(COMMON_CHARS, CHAR_KINDS)):
        for left, right in product(LEFT, RIGHT):
            yield before + left, f" {right}{after}"
        for left, right in product(LEFT, LINED):
            yield f"{before}{left}\n", right + after
