"""Pre-tokenizers of llama.cpp for byte-level BPE, by their names in GGUF files."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LLAMA_CPP_CASES = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"  # in llama.cpp, words also end before combining marks
DIGITS = r"\p{N}{1,3}"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35 = QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")


def cased_pattern(upper: str, lower: str, ending: str, digits: str) -> str:
    """Pattern of words that are split between a lowercase and an uppercase letter."""
    alternatives = (rf"[^\r\n\p{{L}}\p{{N}}]?{upper}{a}{lower}{b}{ending}" for a, b in ("*+", "+*"))
    return rf"{'|'.join(alternatives)}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"


DEEPSEEK = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + SPACES,
)


@dataclass(frozen=True)
class PreTokenizer:
    """Regular expressions that split the text one after the other, as in tokenizer.json.

    `ignore_merges`: words that are tokens are not merged from characters. `llama_cpp_patterns`: expressions that
    llama.cpp uses instead.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    llama_cpp_patterns: tuple[str, ...] | None = None


# llama.cpp has several names for the same pre-tokenizer; this table has one of each.
PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer((GPT2,)),
    "smollm": PreTokenizer((r"\p{N}", GPT2)),
    "qwen2": PreTokenizer((QWEN2,)),
    "qwen35": PreTokenizer((QWEN35,)),
    "llama-bpe": PreTokenizer((LLAMA3,), True),
    "dbrx": PreTokenizer((LLAMA3,)),
    "tekken": PreTokenizer(
        (cased_pattern(UPPER, LOWER, "", r"\p{N}"),), True, (cased_pattern(*LLAMA_CPP_CASES, "", r"\p{N}"),)
    ),
    "gpt-4o": PreTokenizer(
        (cased_pattern(UPPER, LOWER, f"{CONTRACTIONS}?", DIGITS),),
        False,
        (cased_pattern(*LLAMA_CPP_CASES, f"{CONTRACTIONS}?", DIGITS),),
    ),
    "deepseek-v3": PreTokenizer(DEEPSEEK),
}


def match_pretokenizer(step: Mapping[str, Any] | None, ignore_merges: bool) -> str | None:
    """Name of the llama.cpp pre-tokenizer that equals that of a tokenizer.json; None if there is none."""
    key = tuple(split_patterns(step)), ignore_merges
    return next((name for name, pre in PRE_TOKENIZERS.items() if (pre.patterns, pre.ignore_merges) == key), None)


def split_patterns(step: Mapping[str, Any] | None) -> Iterator[str]:
    """Regular expressions of a pre-tokenizer in a tokenizer.json."""
    match step:
        case {"type": "Sequence", "pretokenizers": steps}:
            for child in steps:
                yield from split_patterns(child)
        case {"type": "Split", "pattern": {"Regex": text}}:
            yield text
        case {"type": "Digits", "individual_digits": True}:
            yield r"\p{N}"
        case {"type": "ByteLevel", "use_regex": True}:
            yield GPT2
