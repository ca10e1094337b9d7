"""A tokenizer as the fields of a GGUF file tell it, and what llama.cpp makes of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gguf import Keys
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from tunekit.export.pretokenizer import PRE
from tunekit.export.sentencepiece_bpe import MARKS, SentencePieceBPE

KEYS = Keys.Tokenizer
BYTES, PIECES = "gpt2", "llama"  # what files call byte-level BPE, and SentencePiece's


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
    rest: Mapping[str, Any] = field(default_factory=dict)  # special ids, flags and templates, by their keys

    def said(self) -> dict[str, Any]:
        """The fields."""
        own = dict(zip(OWN, (getattr(self, name) for name in OWN.values()), strict=True))
        return {key: value for key, value in (own | dict(self.rest)).items() if value is not None}

    @staticmethod
    def read(said: Mapping[str, Any]) -> "Vocabulary":
        """What the fields of a file tell."""
        own = {name: said[key] for key, name in OWN.items() if key in said}
        rest = {key: value for key, value in said.items() if key.startswith("tokenizer.") and key not in OWN}
        return Vocabulary(**own, rest=rest)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids as llama.cpp makes them, with nothing put before or behind a text; marks in it are tokens."""
        if self.scores is not None:
            return [self.pieces.encode(text) for text in texts]
        return [encoding.ids for encoding in self.merger.encode_batch_fast(list(texts), add_special_tokens=False)]

    @cached_property
    def pieces(self) -> SentencePieceBPE:
        assert self.scores is not None, self.model
        return SentencePieceBPE(self.tokens, self.types, self.scores, self.space)

    @cached_property
    def merger(self) -> Tokenizer:
        """Byte-level BPE."""
        pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in self.merges or ())]
        ids = {token: i for i, token in enumerate(self.tokens)}
        way = PRE[self.pre]
        tokenizer = Tokenizer(models.BPE(ids, pairs, ignore_merges=way.whole))
        cuts = [pre_tokenizers.Split(Regex(text), "isolated") for text in way.cuts or way.patterns]
        steps = [*cuts, pre_tokenizers.ByteLevel(False, use_regex=False)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        marks = zip(self.tokens, self.types, strict=True)
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in marks if kind in MARKS])
        return tokenizer


OWN = {KEYS.MODEL: "model", KEYS.LIST: "tokens", KEYS.TOKEN_TYPE: "types", KEYS.MERGES: "merges"}
OWN |= {KEYS.SCORES: "scores", KEYS.PRE: "pre", KEYS.ADD_PREFIX: "space"}
