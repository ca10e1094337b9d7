"""Tokenizer fields of a GGUF file, and tokenization as in llama.cpp."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gguf import Keys
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from tunekit.export.pretokenizer import PRE_TOKENIZERS
from tunekit.export.sentencepiece_bpe import SPECIAL_TYPES, SentencePieceBPE

KEYS = Keys.Tokenizer
BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"  # GGUF names of the tokenizer models


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
    def sentencepiece(self) -> SentencePieceBPE:
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


FIELD_NAMES = {KEYS.MODEL: "model", KEYS.LIST: "tokens", KEYS.TOKEN_TYPE: "types", KEYS.MERGES: "merges"}
FIELD_NAMES |= {KEYS.SCORES: "scores", KEYS.PRE: "pre", KEYS.ADD_PREFIX: "space"}
