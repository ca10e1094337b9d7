"""SentencePiece BPE as in llama.cpp: repeatedly merges the adjacent pair with the highest score."""

import heapq
import re
from collections.abc import Mapping, Sequence

from gguf import TokenType

SPACE = "\u2581"
SPECIAL_TYPES = {TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN}  # matched before text is tokenized


class SentencePieceBPE:
    """SentencePiece vocabulary. `add_space` inserts a space before the text and after every special token."""

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
