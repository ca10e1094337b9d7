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
from tunekit.export.pretokenizer import PRE, match_pretokenizer
from tunekit.export.sentencepiece_bpe import MARKS, SPACE
from tunekit.export.vocabulary import BYTES, PIECES, Vocabulary

KEYS = Keys.Tokenizer
BYTE = re.compile("<0x[0-9A-F]{2}>")
# What llama.cpp takes for the end of an answer by its text, whatever a file says.
ENDS = {
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
FEW = 1 / 50  # of the probes may become other ids, if none of these texts does: it is said
TEXTS = (
    "The quick brown fox jumps over the lazy dog. It's 12:30, isn't it? WE'LL SEE!",
    "def f(x):\n    if x:\n\t\treturn x ** 2 - 1000000.25  # done\n\n\n",
    "¿Qué? Größe naïve façade — “quotes” … 𝔘𝔫𝔦 🙂👩‍👩‍👧 mixedCase HTTPServer snake_case",
    "Привет, мир! 你好，世界。こんにちは 안녕하세요 שלום مرحبا नमस्ते ไทย កាន់តែ",
    "one, two   \r\n\r\n a  b   c    d\u00a0e\u3000f",
)
Tried = tuple[Vocabulary, tuple[str, ...]]  # and what people should know about it


def read_vocabulary(tokenizer: Tokenizer, size: int, where: str) -> Tried:
    """The vocabulary of a model with `size` embeddings."""
    raw = json.loads(tokenizer.model.to_str())
    model, before = raw["model"], json.dumps(raw["pre_tokenizer"])
    if tokenizer.size > size:
        raise UserError(f"{where}: the tokenizer has ids up to {tokenizer.size - 1}, and the model {size} embeddings")
    if model["type"] == "BPE" and '"ByteLevel"' in before:
        found, notes = of_bytes(tokenizer, raw, size, where)
    elif model["type"] == "BPE" and model["byte_fallback"]:
        found, notes = of_pieces(tokenizer, raw, size, where)
    else:
        kind = "BPE tokenizer without bytes" if model["type"] == "BPE" else f"{model['type']} tokenizer"
        raise UserError(f"{where}: a {kind} cannot be written as GGUF; byte-level BPE and SentencePiece's BPE can")
    rest, more = specials(tokenizer)
    marks = [mark for mark, kind in zip(found.tokens, found.types, strict=True) if kind in MARKS]
    if odd := differences(found, around(marks), tokenizer.encode_texts(around(marks))):
        more += (f"llama.cpp reads the text around special tokens otherwise: {odd[0]}",)
    return replace(found, rest=rest), (*notes, *more)


def of_bytes(tokenizer: Tokenizer, raw: Mapping[str, Any], size: int, where: str) -> Tried:
    """Byte-level BPE, under the name of a pre-tokenizer that stands the test."""
    kind = (raw["normalizer"] or {"type": "NFC"})["type"]
    if kind != "NFC":
        raise UserError(f"{where}: llama.cpp does not change a text before it cuts it; this tokenizer does ({kind})")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in raw["model"]["merges"]]
    plain = Vocabulary(BYTES, *tokens(tokenizer, size), merges)
    name = match_pretokenizer(raw["pre_tokenizer"], raw["model"]["ignore_merges"])
    # llama.cpp does not compose characters: other ids may come of texts that are not composed.
    texts = [unicodedata.normalize("NFC", text) for text in probes(tokenizer)]
    return best((replace(plain, pre=one) for one in ([name] if name else PRE)), tokenizer, texts, where, bool(name))


def of_pieces(tokenizer: Tokenizer, raw: Mapping[str, Any], size: int, where: str) -> Tried:
    """SentencePiece's BPE: the earlier a merge, the better the token that it makes."""
    texts, types = tokens(tokenizer, size)
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(raw["model"]["merges"]):
        ranks.setdefault("".join(merge.split(" ") if isinstance(merge, str) else merge), rank)
    scores = [-float(ranks.get(text, len(raw["model"]["merges"]))) for text in texts]
    types = [int(TokenType.BYTE) if BYTE.fullmatch(text) else kind for text, kind in zip(texts, types, strict=True)]
    tries = (Vocabulary(PIECES, texts, types, scores=scores, space=space) for space in (True, False))
    spaced = {text for text in probes(tokenizer) if text.startswith(" ")}
    found, notes = best(tries, tokenizer, [text for text in probes(tokenizer) if text not in spaced], where)
    if odd := differences(found, sorted(spaced), tokenizer.encode_texts(sorted(spaced))):
        notes += (f"llama.cpp puts a space before a text also where one is there: {odd[0]}",)
    return found, notes


def best(
    tries: Iterable[Vocabulary], tokenizer: Tokenizer, texts: Sequence[str], where: str, named: bool = False
) -> Tried:
    """The vocabulary of which llama.cpp makes the same ids, or nearly always the same. What llama.cpp has a name for
    is taken in any case: it means this tokenizer, however near it comes."""
    wanted = tokenizer.encode_texts(texts)
    fewest: tuple[Vocabulary, list[str]] | None = None
    for one in tries:
        other = differences(one, texts, wanted)
        if fewest is None or len(other) < len(fewest[1]):
            fewest = one, other
        if not other:
            return one, ()
    assert fewest is not None, where
    vocabulary, other = fewest
    told = f"of {len(texts):,} short texts llama.cpp makes other tokens of {len(other):,}: {other[0]}"
    many = len(other) > FEW * len(texts) or differences(vocabulary, TEXTS, tokenizer.encode_texts(TEXTS))
    if many and not named:
        raise UserError(f"{where}: the tokenizer cannot be written as GGUF: {told}")
    return vocabulary, (told,)


def tokens(tokenizer: Tokenizer, size: int) -> tuple[list[str], list[int]]:
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


def probes(tokenizer: Tokenizer) -> list[str]:
    """Texts that show how a tokenizer cuts: some real ones, many short ones, and every token alone."""
    ids = [[i] for i in range(tokenizer.size)]
    words = tokenizer.model.decode_batch(ids, skip_special_tokens=True)
    rows = ("".join(row) for row in product(SAMPLES, repeat=3))
    return [*TEXTS, *rows, *(word for word in words if word and UNFINISHED not in word)]


def around(marks: Sequence[str]) -> list[str]:
    return [text for mark in marks for text in (f"a{mark}b", f"a {mark} b", f"{mark}{mark}\n")]


def differences(vocabulary: Vocabulary, texts: Sequence[str], wanted: Sequence[Sequence[int]]) -> list[str]:
    """The texts of which llama.cpp makes other ids, with both."""
    found = zip(texts, vocabulary.encode(texts), wanted, strict=True)
    return [f"{text!r} becomes {mine} and not {other}" for text, mine, other in found if mine != other]


def specials(tokenizer: Tokenizer) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Special ids, what is put around a text, and chat templates."""
    notes: list[str] = []
    said: dict[str, Any] = {KEYS.BOS_ID: tokenizer.bos, KEYS.EOS_ID: tokenizer.eos}
    said |= {KEYS.UNK_ID: tokenizer.named("unk_token"), KEYS.PAD_ID: tokenizer.named("pad_token")}
    known = {tokenizer.eos} | {i for i in tokenizer.stops if tokenizer.model.id_to_token(i) in ENDS}
    others = sorted(tokenizer.stops - known)
    said |= dict(zip((KEYS.EOT_ID, KEYS.EOM_ID), others, strict=False))
    if others[2:]:
        texts = (tokenizer.decode([i], special=True) for i in others[2:])
        notes.append(f"llama.cpp does not end an answer at {', '.join(texts)}")
    inside, whole = tokenizer.encode("a"), tokenizer.encode("a", special=True)
    start = next(i for i in range(len(whole)) if whole[i : i + len(inside)] == inside)
    before, behind = whole[:start], whole[start + len(inside) :]
    said |= {KEYS.ADD_BOS: before == [tokenizer.bos], KEYS.ADD_EOS: behind == [tokenizer.eos]}
    if before not in ([], [tokenizer.bos]) or behind not in ([], [tokenizer.eos]):
        notes.append(f"llama.cpp puts nothing around a text, and this tokenizer {before} and {behind}")
    for name, (text, _) in tokenizer.templates.items():
        said[KEYS.CHAT_TEMPLATE if name == "default" else KEYS.CHAT_TEMPLATE_N.format(name=name)] = text
    said[KEYS.CHAT_TEMPLATES] = sorted(set(tokenizer.templates) - {"default"}) or None
    return {key: value for key, value in said.items() if value is not None}, tuple(notes)
