"""llama.cpp's ways to cut a text into words before byte-level BPE, by the names that files give them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ROUGH = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"  # llama.cpp's words end before combining marks, too
DIGITS = r"\p{N}{1,3}"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35 = QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")


def cased(upper: str, lower: str, ending: str, digits: str) -> str:
    """Words that end where an upper case letter follows a lower case one."""
    words = (rf"[^\r\n\p{{L}}\p{{N}}]?{upper}{a}{lower}{b}{ending}" for a, b in ("*+", "+*"))
    return rf"{'|'.join(words)}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"


DEEPSEEK = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + SPACES,
)


@dataclass(frozen=True)
class PreTokenizer:
    """Expressions that cut the text in turn, as tokenizers write them. `whole`: a word that is a token is taken before
    any merge is tried. `cuts`: what llama.cpp uses in place of the expressions."""

    patterns: tuple[str, ...]
    whole: bool = False
    cuts: tuple[str, ...] | None = None


# Many names of llama.cpp mean the same; one of each is here.
PRE = {
    "gpt-2": PreTokenizer((GPT2,)),
    "smollm": PreTokenizer((r"\p{N}", GPT2)),
    "qwen2": PreTokenizer((QWEN2,)),
    "qwen35": PreTokenizer((QWEN35,)),
    "llama-bpe": PreTokenizer((LLAMA3,), True),
    "dbrx": PreTokenizer((LLAMA3,)),
    "tekken": PreTokenizer((cased(UPPER, LOWER, "", r"\p{N}"),), True, (cased(*ROUGH, "", r"\p{N}"),)),
    "gpt-4o": PreTokenizer((cased(UPPER, LOWER, f"{SHORT}?", DIGITS),), False, (cased(*ROUGH, f"{SHORT}?", DIGITS),)),
    "deepseek-v3": PreTokenizer(DEEPSEEK),
}


def match_pretokenizer(step: Mapping[str, Any] | None, whole: bool) -> str | None:
    """The name of the way that reads as the pre-tokenizer of a tokenizer.json does."""
    own = tuple(patterns(step)), whole
    return next((name for name, way in PRE.items() if (way.patterns, way.whole) == own), None)


def patterns(step: Mapping[str, Any] | None) -> Iterator[str]:
    """The expressions of a pre-tokenizer."""
    match step:
        case {"type": "Sequence", "pretokenizers": steps}:
            for one in steps:
                yield from patterns(one)
        case {"type": "Split", "pattern": {"Regex": text}}:
            yield text
        case {"type": "Digits", "individual_digits": True}:
            yield r"\p{N}"
        case {"type": "ByteLevel", "use_regex": True}:
            yield GPT2
