"""Tokenizer fields of a GGUF file, and tokenization as in llama.cpp."""

import heapq
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gguf import Keys, TokenType
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from tunekit.export.pretokenizer import PRE_TOKENIZERS

KEYS = Keys.Tokenizer
BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"  # GGUF names of the tokenizer models
FIELD_NAMES = {KEYS.MODEL: "model", KEYS.LIST: "tokens", KEYS.TOKEN_TYPE: "types", KEYS.MERGES: "merges"}
FIELD_NAMES |= {KEYS.SCORES: "scores", KEYS.PRE: "pre", KEYS.ADD_PREFIX: "space"}
SPACE = "\u2581"
SPECIAL_TYPES = {TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN}  # matched before text is tokenized


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id, with the data to tokenize text."""

    model: str
    tokens: list[str]
    types: list[int]
    merges: list[str] | None = None  # of byte-level BPE, in order of priority
    scores: list[float] | None = None  # of SentencePiece
    pre: str = "default"  # name of the pre-tokenizer
    space: bool = False  # SentencePiece: add a space before the text
    extra_fields: Mapping[str, Any] = field(default_factory=dict)  # special ids, flags and chat templates

    def to_fields(self) -> dict[str, Any]:
        """Fields of the GGUF file."""
        fields = dict(zip(FIELD_NAMES, (getattr(self, name) for name in FIELD_NAMES.values()), strict=True))
        return {key: value for key, value in (fields | dict(self.extra_fields)).items() if value is not None}

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> "Vocabulary":
        """Read the vocabulary from the fields of a GGUF file."""
        values = {name: fields[key] for key, name in FIELD_NAMES.items() if key in fields}
        extra = {key: v for key, v in fields.items() if key.startswith("tokenizer.") and key not in FIELD_NAMES}
        return Vocabulary(**values, extra_fields=extra)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids as in llama.cpp, without BOS and EOS. Special tokens in the text are parsed."""
        if self.scores is not None:
            return [self.sentencepiece.encode(text) for text in texts]
        encodings = self.byte_level_bpe.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    @cached_property
    def sentencepiece(self) -> "SentencePieceBPE":
        assert self.scores is not None, self.model
        return SentencePieceBPE(self.tokens, self.types, self.scores, self.space)

    @cached_property
    def byte_level_bpe(self) -> Tokenizer:
        """Byte-level BPE tokenizer."""
        pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in self.merges or ())]
        ids = {token: i for i, token in enumerate(self.tokens)}
        pre = PRE_TOKENIZERS[self.pre]
        tokenizer = Tokenizer(models.BPE(ids, pairs, ignore_merges=pre.ignore_merges))
        splits = [pre_tokenizers.Split(Regex(text), "isolated") for text in pre.llama_cpp_patterns or pre.patterns]
        steps = [*splits, pre_tokenizers.ByteLevel(False, use_regex=False)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        special = [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in SPECIAL_TYPES]
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in special])
        return tokenizer


class SentencePieceBPE:
    """SentencePiece BPE as in llama.cpp: repeatedly merges the adjacent pair with the highest score.

    `add_space` inserts a space before the text and after every special token.
    """

    def __init__(self, tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], add_space: bool) -> None:
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.scores = dict(zip(tokens, scores, strict=True))
        self.space = " " if add_space else ""
        special_tokens = {token for token, kind in zip(tokens, types, strict=True) if kind in SPECIAL_TYPES}
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self.special_pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def encode(self, text: str) -> list[int]:
        ids, start = [], 0
        for match in self.special_pattern.finditer(text):
            ids += [*self.encode_plain(text[start : match.start()]), self.ids[match[0]]]
            start = match.end()
        return ids + self.encode_plain(text[start:])

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text without special tokens. Unknown characters become byte tokens."""
        if not text:
            return []
        ids: list[int] = []
        for token in merge_pairs(list((self.space + text).replace(" ", SPACE)), self.scores):
            is_known = token in self.ids
            ids += [self.ids[token]] if is_known else [self.ids[f"<0x{byte:02X}>"] for byte in token.encode()]
        return ids


def merge_pairs(tokens: list[str], scores: Mapping[str, float]) -> list[str]:
    """Merge characters to tokens: the pair with the highest score first, the leftmost one if scores are equal."""
    previous, following = list(range(-1, len(tokens) - 1)), list(range(1, len(tokens) + 1))
    heap: list[tuple[float, int, str]] = []

    def push_pair(left: int) -> None:
        if left >= 0 and following[left] < len(tokens) and (merged := tokens[left] + tokens[following[left]]) in scores:
            heapq.heappush(heap, (-scores[merged], left, merged))

    for i in range(len(tokens) - 1):
        push_pair(i)
    while heap:
        _, left, merged = heapq.heappop(heap)
        right = following[left]
        if not tokens[left] or right == len(tokens) or tokens[left] + tokens[right] != merged:
            continue  # one of them was merged since
        tokens[left], tokens[right], following[left] = merged, "", following[right]
        if following[right] < len(tokens):
            previous[following[right]] = left
        push_pair(previous[left])
        push_pair(left)
    return [token for token in tokens if token]
