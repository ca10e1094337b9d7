"""A tokenizer as the fields of a GGUF file tell it, and what llama.cpp makes of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gguf import Keys
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from tunekit.export.pretokenizer import PRE_TOKENIZERS
from tunekit.export.sentencepiece_bpe import SPECIAL_TYPES, SentencePieceBPE

KEYS = Keys.Tokenizer
BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"  # what files call byte-level BPE, and SentencePiece's


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by their ids, and how a text becomes some of them."""

    model: str
    tokens: list[str]
    types: list[int]
    merges: list[str] | None = None  # of byte-level BPE, the first goes first
    scores: list[float] | None = None  # of pieces
    pre: str = "default"  # the name of a way to cut a text into words
    space: bool = False  # before a text of pieces
    extra_fields: Mapping[str, Any] = field(default_factory=dict)  # special ids, flags and templates, by their keys

    def to_fields(self) -> dict[str, Any]:
        """The fields."""
        fields = dict(zip(FIELD_NAMES, (getattr(self, name) for name in FIELD_NAMES.values()), strict=True))
        return {key: value for key, value in (fields | dict(self.extra_fields)).items() if value is not None}

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> "Vocabulary":
        """What the fields of a file tell."""
        values = {name: fields[key] for key, name in FIELD_NAMES.items() if key in fields}
        extra_fields = {
            key: value for key, value in fields.items() if key.startswith("tokenizer.") and key not in FIELD_NAMES
        }
        return Vocabulary(**values, extra_fields=extra_fields)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids as llama.cpp makes them, with nothing put before or behind a text; marks in it are tokens."""
        if self.scores is not None:
            return [self.sentencepiece.encode(text) for text in texts]
        return [
            encoding.ids for encoding in self.byte_level_bpe.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    @cached_property
    def sentencepiece(self) -> SentencePieceBPE:
        assert self.scores is not None, self.model
        return SentencePieceBPE(self.tokens, self.types, self.scores, self.space)

    @cached_property
    def byte_level_bpe(self) -> Tokenizer:
        """Byte-level BPE."""
        pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in self.merges or ())]
        ids = {token: i for i, token in enumerate(self.tokens)}
        pre = PRE_TOKENIZERS[self.pre]
        tokenizer = Tokenizer(models.BPE(ids, pairs, ignore_merges=pre.ignore_merges))
        splits = [pre_tokenizers.Split(Regex(text), "isolated") for text in pre.llama_cpp_patterns or pre.patterns]
        steps = [*splits, pre_tokenizers.ByteLevel(False, use_regex=False)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        typed_tokens = zip(self.tokens, self.types, strict=True)
        tokenizer.add_tokens(
            [AddedToken(token, normalized=False) for token, kind in typed_tokens if kind in SPECIAL_TYPES]
        )
        return tokenizer


FIELD_NAMES = {KEYS.MODEL: "model", KEYS.LIST: "tokens", KEYS.TOKEN_TYPE: "types", KEYS.MERGES: "merges"}
FIELD_NAMES |= {KEYS.SCORES: "scores", KEYS.PRE: "pre", KEYS.ADD_PREFIX: "space"}
