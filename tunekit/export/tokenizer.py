"""A checkpoint's tokenizer as a vocabulary of GGUF, tried out: llama.cpp must make the same ids of the same text."""

import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from gguf import Keys, TokenType

from tunekit.data.tokenizer import UNFINISHED, Tokenizer
from tunekit.errors import UserError
from tunekit.export.pretokenizer import PRE_TOKENIZERS, match_pretokenizer
from tunekit.export.sentencepiece_bpe import SPACE, SPECIAL_TYPES
from tunekit.export.vocabulary import BYTE_LEVEL, SENTENCEPIECE, Vocabulary

KEYS = Keys.Tokenizer
BYTE = re.compile("<0x[0-9A-F]{2}>")
# What llama.cpp takes for the end of an answer by its text, whatever a file says.
END_TOKENS = {
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<|end_of_text|>",
}
# All rows of three of these are tried.
SAMPLES = ("s", "re", "A", "7", "777", "é", "中", "\u0301", " ", "  ", "\n", "\t", "\r", "'", ".", "(", "_")
MAX_MISMATCH_FRACTION = 1 / 50  # of the probes may become other ids, if none of these texts does: it is said
TEXTS = (
    "The quick brown fox jumps over the lazy dog. It's 12:30, isn't it? WE'LL SEE!",
    "def f(x):\n    if x:\n\t\treturn x ** 2 - 1000000.25  # done\n\n\n",
    "¿Qué? Größe naïve façade — “quotes” … 𝔘𝔫𝔦 🙂👩‍👩‍👧 mixedCase HTTPServer snake_case",
    "Привет, мир! 你好，世界。こんにちは 안녕하세요 שלום مرحبا नमस्ते ไทย កាន់តែ",
    "one, two   \r\n\r\n a  b   c    d\u00a0e\u3000f",
)
CheckedVocabulary = tuple[Vocabulary, tuple[str, ...]]  # and what people should know about it


def read_vocabulary(tokenizer: Tokenizer, size: int, where: str) -> CheckedVocabulary:
    """The vocabulary of a model with `size` embeddings."""
    config = json.loads(tokenizer.model.to_str())
    model, pre_tokenizer = config["model"], json.dumps(config["pre_tokenizer"])
    if tokenizer.size > size:
        raise UserError(f"{where}: the tokenizer has ids up to {tokenizer.size - 1}, and the model {size} embeddings")
    if model["type"] == "BPE" and '"ByteLevel"' in pre_tokenizer:
        vocabulary, notes = byte_level_vocabulary(tokenizer, config, size, where)
    elif model["type"] == "BPE" and model["byte_fallback"]:
        vocabulary, notes = sentencepiece_vocabulary(tokenizer, config, size, where)
    else:
        kind = "BPE tokenizer without bytes" if model["type"] == "BPE" else f"{model['type']} tokenizer"
        raise UserError(f"{where}: a {kind} cannot be written as GGUF; byte-level BPE and SentencePiece's BPE can")
    fields, warnings = special_fields(tokenizer)
    special = [token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind in SPECIAL_TYPES]
    if mismatches := find_mismatches(
        vocabulary, special_token_texts(special), tokenizer.encode_texts(special_token_texts(special))
    ):
        warnings += (f"llama.cpp reads the text around special tokens otherwise: {mismatches[0]}",)
    return replace(vocabulary, extra_fields=fields), (*notes, *warnings)


def byte_level_vocabulary(tokenizer: Tokenizer, config: Mapping[str, Any], size: int, where: str) -> CheckedVocabulary:
    """Byte-level BPE, under the name of a pre-tokenizer that stands the test."""
    kind = (config["normalizer"] or {"type": "NFC"})["type"]
    if kind != "NFC":
        raise UserError(f"{where}: llama.cpp does not change a text before it cuts it; this tokenizer does ({kind})")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in config["model"]["merges"]]
    base = Vocabulary(BYTE_LEVEL, *token_texts_and_types(tokenizer, size), merges)
    name = match_pretokenizer(config["pre_tokenizer"], config["model"]["ignore_merges"])
    # llama.cpp does not compose characters: other ids may come of texts that are not composed.
    texts = [unicodedata.normalize("NFC", text) for text in build_test_texts(tokenizer)]
    return select_vocabulary(
        (replace(base, pre=pre) for pre in ([name] if name else PRE_TOKENIZERS)), tokenizer, texts, where, bool(name)
    )


def sentencepiece_vocabulary(
    tokenizer: Tokenizer, config: Mapping[str, Any], size: int, where: str
) -> CheckedVocabulary:
    """SentencePiece's BPE: the earlier a merge, the better the token that it makes."""
    texts, types = token_texts_and_types(tokenizer, size)
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(config["model"]["merges"]):
        ranks.setdefault("".join(merge.split(" ") if isinstance(merge, str) else merge), rank)
    scores = [-float(ranks.get(text, len(config["model"]["merges"]))) for text in texts]
    types = [int(TokenType.BYTE) if BYTE.fullmatch(text) else kind for text, kind in zip(texts, types, strict=True)]
    candidates = (Vocabulary(SENTENCEPIECE, texts, types, scores=scores, space=space) for space in (True, False))
    spaced = {text for text in build_test_texts(tokenizer) if text.startswith(" ")}
    vocabulary, notes = select_vocabulary(
        candidates, tokenizer, [text for text in build_test_texts(tokenizer) if text not in spaced], where
    )
    if mismatches := find_mismatches(vocabulary, sorted(spaced), tokenizer.encode_texts(sorted(spaced))):
        notes += (f"llama.cpp puts a space before a text also where one is there: {mismatches[0]}",)
    return vocabulary, notes


def select_vocabulary(
    candidates: Iterable[Vocabulary], tokenizer: Tokenizer, texts: Sequence[str], where: str, is_known: bool = False
) -> CheckedVocabulary:
    """The vocabulary of which llama.cpp makes the same ids, or nearly always the same. What llama.cpp has a name for
    is taken in any case: it means this tokenizer, however near it comes."""
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
    warning = f"of {len(texts):,} short texts llama.cpp makes other tokens of {len(mismatches):,}: {mismatches[0]}"
    has_many = len(mismatches) > MAX_MISMATCH_FRACTION * len(texts) or find_mismatches(
        vocabulary, TEXTS, tokenizer.encode_texts(TEXTS)
    )
    if has_many and not is_known:
        raise UserError(f"{where}: the tokenizer cannot be written as GGUF: {warning}")
    return vocabulary, (warning,)


def token_texts_and_types(tokenizer: Tokenizer, size: int) -> tuple[list[str], list[int]]:
    """Texts and types of the ids below `size`."""
    texts, types = [f"[PAD{i}]" for i in range(size)], [TokenType.UNUSED] * size
    for text, i in tokenizer.model.get_vocab(with_added_tokens=True).items():
        texts[i], types[i] = text, TokenType.NORMAL
    for i, added in tokenizer.model.get_added_tokens_decoder().items():
        if added.special or i in tokenizer.stops:
            types[i] = TokenType.CONTROL
        elif added.normalized or SPACE not in added.content:  # else no text holds it: texts have spaces there
            texts[i], types[i] = added.content.replace(SPACE, " "), TokenType.USER_DEFINED
    return texts, [int(kind) for kind in types]


def build_test_texts(tokenizer: Tokenizer) -> list[str]:
    """Texts that show how a tokenizer cuts: some real ones, many short ones, and every token alone."""
    ids = [[i] for i in range(tokenizer.size)]
    token_texts = tokenizer.model.decode_batch(ids, skip_special_tokens=True)
    rows = ("".join(row) for row in product(SAMPLES, repeat=3))
    return [*TEXTS, *rows, *(text for text in token_texts if text and UNFINISHED not in text)]


def special_token_texts(tokens: Sequence[str]) -> list[str]:
    return [text for token in tokens for text in (f"a{token}b", f"a {token} b", f"{token}{token}\n")]


def find_mismatches(vocabulary: Vocabulary, texts: Sequence[str], expected: Sequence[Sequence[int]]) -> list[str]:
    """The texts of which llama.cpp makes other ids, with both."""
    triples = zip(texts, vocabulary.encode(texts), expected, strict=True)
    return [f"{text!r} becomes {actual} and not {ids}" for text, actual, ids in triples if actual != ids]


def special_fields(tokenizer: Tokenizer) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Special ids, what is put around a text, and chat templates."""
    notes: list[str] = []
    fields: dict[str, Any] = {KEYS.BOS_ID: tokenizer.bos, KEYS.EOS_ID: tokenizer.eos}
    fields |= {KEYS.UNK_ID: tokenizer.special_token("unk_token"), KEYS.PAD_ID: tokenizer.special_token("pad_token")}
    end_ids = {tokenizer.eos} | {i for i in tokenizer.stops if tokenizer.model.id_to_token(i) in END_TOKENS}
    other_ids = sorted(tokenizer.stops - end_ids)
    fields |= dict(zip((KEYS.EOT_ID, KEYS.EOM_ID), other_ids, strict=False))
    if other_ids[2:]:
        texts = (tokenizer.decode([i], special=True) for i in other_ids[2:])
        notes.append(f"llama.cpp does not end an answer at {', '.join(texts)}")
    bare, full = tokenizer.encode("a"), tokenizer.encode("a", special=True)
    start = next(i for i in range(len(full)) if full[i : i + len(bare)] == bare)
    before, after = full[:start], full[start + len(bare) :]
    fields |= {KEYS.ADD_BOS: before == [tokenizer.bos], KEYS.ADD_EOS: after == [tokenizer.eos]}
    if before not in ([], [tokenizer.bos]) or after not in ([], [tokenizer.eos]):
        notes.append(f"llama.cpp puts nothing around a text, and this tokenizer {before} and {after}")
    for name, (text, _) in tokenizer.templates.items():
        fields[KEYS.CHAT_TEMPLATE if name == "default" else KEYS.CHAT_TEMPLATE_N.format(name=name)] = text
    fields[KEYS.CHAT_TEMPLATES] = sorted(set(tokenizer.templates) - {"default"}) or None
    return {key: value for key, value in fields.items() if value is not None}, tuple(notes)
