"""Converts a tokenizer to a GGUF vocabulary, and checks that llama.cpp tokenizes test texts to the same ids."""

import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from gguf import Keys, TokenType

from tunekit.data.tokenizer import INCOMPLETE_CHAR, Tokenizer
from tunekit.errors import UserError
from tunekit.export.pretokenizer import PRE_TOKENIZERS, match_pretokenizer
from tunekit.export.vocabulary import BYTE_LEVEL, SENTENCEPIECE, SPACE, SPECIAL_TYPES, Vocabulary

KEYS = Keys.Tokenizer
BYTE = re.compile("<0x[0-9A-F]{2}>")
# Texts that llama.cpp always treats as end-of-generation tokens.
END_TOKENS = {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>"}
END_TOKENS |= {"<|end_of_text|>"}
# All sequences of three of these are tested.
SAMPLES = ("s", "re", "A", "7", "777", "é", "中", "\u0301", " ", "  ", "\n", "\t", "\r", "'", ".", "(", "_")
MAX_MISMATCH_FRACTION = 1 / 50  # of the test texts; fewer mismatches outside TEXTS are only a warning
TEXTS = (
    "The quick brown fox jumps over the lazy dog. It's 12:30, isn't it? WE'LL SEE!",
    "def f(x):\n    if x:\n\t\treturn x ** 2 - 1000000.25  # done\n\n\n",
    "¿Qué? Größe naïve façade — “quotes” … 𝔘𝔫𝔦 🙂👩‍👩‍👧 mixedCase HTTPServer snake_case",
    "Привет, мир! 你好，世界。こんにちは 안녕하세요 שלום مرحبا नमस्ते ไทย កាន់តែ",
    "one, two   \r\n\r\n a  b   c    d\u00a0e\u3000f",
)
CheckedVocabulary = tuple[Vocabulary, tuple[str, ...]]  # and warnings


def read_vocabulary(tokenizer: Tokenizer, size: int, where: str) -> CheckedVocabulary:
    """Build the vocabulary of a model with `size` embeddings. Raises UserError if llama.cpp has no equivalent."""
    config = json.loads(tokenizer.model.to_str())
    model, pre_tokenizer = config["model"], json.dumps(config["pre_tokenizer"])
    if tokenizer.size > size:
        problem = f"the tokenizer has ids up to {tokenizer.size - 1}, but the model has only {size} embeddings"
        raise UserError(f"{where}: {problem}")
    if model["type"] == "BPE" and '"ByteLevel"' in pre_tokenizer:
        vocabulary, notes = byte_level_vocabulary(tokenizer, config, size, where)
    elif model["type"] == "BPE" and model["byte_fallback"]:
        vocabulary, notes = sentencepiece_vocabulary(tokenizer, config, size, where)
    else:
        kind = "BPE tokenizer without byte fallback" if model["type"] == "BPE" else f"{model['type']} tokenizer"
        raise UserError(f"{where}: cannot export a {kind} to GGUF; supported: byte-level BPE and SentencePiece BPE")
    fields, warnings = special_fields(tokenizer)
    special = [token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind in SPECIAL_TYPES]
    texts = [text for token in special for text in (f"a{token}b", f"a {token} b", f"{token}{token}\n")]
    if mismatches := find_mismatches(vocabulary, texts, tokenizer.encode_texts(texts)):
        warnings += (f"llama.cpp tokenizes text around special tokens differently: {mismatches[0]}",)
    return replace(vocabulary, extra_fields=fields), (*notes, *warnings)


def byte_level_vocabulary(tokenizer: Tokenizer, config: Mapping[str, Any], size: int, where: str) -> CheckedVocabulary:
    """Byte-level BPE with the name of a llama.cpp pre-tokenizer that gives the same ids."""
    kind = (config["normalizer"] or {"type": "NFC"})["type"]
    if kind != "NFC":
        raise UserError(f"{where}: llama.cpp does not support the normalizer {kind} of this tokenizer")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in config["model"]["merges"]]
    base = Vocabulary(BYTE_LEVEL, *token_texts_and_types(tokenizer, size), merges)
    name = match_pretokenizer(config["pre_tokenizer"], config["model"]["ignore_merges"])
    # llama.cpp has no Unicode normalization, so ids may differ for texts that are not in NFC.
    texts = [unicodedata.normalize("NFC", text) for text in build_test_texts(tokenizer)]
    candidates = (replace(base, pre=pre) for pre in ([name] if name else PRE_TOKENIZERS))
    return select_vocabulary(candidates, tokenizer, texts, where, bool(name))


def sentencepiece_vocabulary(
    tokenizer: Tokenizer, config: Mapping[str, Any], size: int, where: str
) -> CheckedVocabulary:
    """SentencePiece BPE. The score of a token is the negative rank of its merge."""
    texts, types = token_texts_and_types(tokenizer, size)
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(config["model"]["merges"]):
        ranks.setdefault("".join(merge.split(" ") if isinstance(merge, str) else merge), rank)
    scores = [-float(ranks.get(text, len(config["model"]["merges"]))) for text in texts]
    types = [int(TokenType.BYTE) if BYTE.fullmatch(text) else kind for text, kind in zip(texts, types, strict=True)]
    candidates = (Vocabulary(SENTENCEPIECE, texts, types, scores=scores, space=space) for space in (True, False))
    test_texts = build_test_texts(tokenizer)
    spaced = sorted({text for text in test_texts if text.startswith(" ")})
    other_texts = [text for text in test_texts if not text.startswith(" ")]
    vocabulary, notes = select_vocabulary(candidates, tokenizer, other_texts, where)
    if mismatches := find_mismatches(vocabulary, spaced, tokenizer.encode_texts(spaced)):
        notes += (f"llama.cpp adds a space also before a text that starts with one: {mismatches[0]}",)
    return vocabulary, notes


def select_vocabulary(
    candidates: Iterable[Vocabulary], tokenizer: Tokenizer, texts: Sequence[str], where: str, is_known: bool = False
) -> CheckedVocabulary:
    """Return the candidate with the fewest mismatches, with a warning if there are any.

    Raises UserError for too many mismatches, unless `is_known`: llama.cpp has a name for this pre-tokenizer.
    """
    expected = tokenizer.encode_texts(texts)
    best: tuple[Vocabulary, list[str]] | None = None
    for candidate in candidates:
        mismatches = find_mismatches(candidate, texts, expected)
        if best is None or len(mismatches) < len(best[1]):
            best = candidate, mismatches
        if not mismatches:
            return candidate, ()
    assert best is not None, where
    vocabulary, mismatches = best
    warning = f"llama.cpp tokenizes {len(mismatches):,} of {len(texts):,} short texts differently: {mismatches[0]}"
    has_many = len(mismatches) > MAX_MISMATCH_FRACTION * len(texts)
    if not is_known and (has_many or find_mismatches(vocabulary, TEXTS, tokenizer.encode_texts(TEXTS))):
        raise UserError(f"{where}: the tokenizer cannot be exported to GGUF: {warning}")
    return vocabulary, (warning,)


def token_texts_and_types(tokenizer: Tokenizer, size: int) -> tuple[list[str], list[int]]:
    """Texts and GGUF token types of the ids below `size`."""
    texts, types = [f"[PAD{i}]" for i in range(size)], [TokenType.UNUSED] * size
    for text, i in tokenizer.model.get_vocab(with_added_tokens=True).items():
        texts[i], types[i] = text, TokenType.NORMAL
    for i, added in tokenizer.model.get_added_tokens_decoder().items():
        if added.special or i in tokenizer.stops:
            types[i] = TokenType.CONTROL
        elif added.normalized or SPACE not in added.content:  # others cannot occur in text, which has spaces instead
            texts[i], types[i] = added.content.replace(SPACE, " "), TokenType.USER_DEFINED
    return texts, [int(kind) for kind in types]


def build_test_texts(tokenizer: Tokenizer) -> list[str]:
    """Test texts: some longer ones, all short sequences of `SAMPLES`, and every single token."""
    ids = [[i] for i in range(tokenizer.size)]
    token_texts = tokenizer.model.decode_batch(ids, skip_special_tokens=True)
    rows = ("".join(row) for row in product(SAMPLES, repeat=3))
    return [*TEXTS, *rows, *(text for text in token_texts if text and INCOMPLETE_CHAR not in text)]


def find_mismatches(vocabulary: Vocabulary, texts: Sequence[str], expected: Sequence[Sequence[int]]) -> list[str]:
    """Descriptions of the texts that llama.cpp tokenizes to different ids."""
    triples = zip(texts, vocabulary.encode(texts), expected, strict=True)
    return [f"{text!r} gives {actual}, expected {ids}" for text, actual, ids in triples if actual != ids]


def special_fields(tokenizer: Tokenizer) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Fields of special ids, of BOS and EOS tokens around a text, and of chat templates; and warnings."""
    notes: list[str] = []
    fields: dict[str, Any] = {KEYS.BOS_ID: tokenizer.bos, KEYS.EOS_ID: tokenizer.eos}
    fields |= {KEYS.UNK_ID: tokenizer.special_token("unk_token"), KEYS.PAD_ID: tokenizer.special_token("pad_token")}
    end_ids = {tokenizer.eos} | {i for i in tokenizer.stops if tokenizer.model.id_to_token(i) in END_TOKENS}
    other_ids = sorted(tokenizer.stops - end_ids)
    fields |= dict(zip((KEYS.EOT_ID, KEYS.EOM_ID), other_ids, strict=False))
    if other_ids[2:]:
        texts = (tokenizer.decode([i], special=True) for i in other_ids[2:])
        notes.append(f"llama.cpp does not stop generation at {', '.join(texts)}")
    bare, full = tokenizer.encode("a"), tokenizer.encode("a", special=True)
    start = next(i for i in range(len(full)) if full[i : i + len(bare)] == bare)
    before, after = full[:start], full[start + len(bare) :]
    fields |= {KEYS.ADD_BOS: before == [tokenizer.bos], KEYS.ADD_EOS: after == [tokenizer.eos]}
    if before not in ([], [tokenizer.bos]) or after not in ([], [tokenizer.eos]):
        notes.append(f"llama.cpp adds no tokens around a text, but this tokenizer adds {before} and {after}")
    for name, text in tokenizer.template_texts.items():
        fields[KEYS.CHAT_TEMPLATE if name == "default" else KEYS.CHAT_TEMPLATE_N.format(name=name)] = text
    fields[KEYS.CHAT_TEMPLATES] = sorted(set(tokenizer.templates) - {"default"}) or None
    return {key: value for key, value in fields.items() if value is not None}, tuple(notes)
