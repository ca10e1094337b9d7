"""llama.cpp's way from a text to pieces, which is SentencePiece's: of all neighbours, the best pair is joined first."""

import heapq
import re
from collections.abc import Mapping, Sequence

from gguf import TokenType

SPACE = "\u2581"
MARKS = {TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN}  # looked for in a text before it is cut


class SentencePieceBPE:
    """A vocabulary of pieces. `space`: a space is put before the text and behind every mark."""

    def __init__(self, tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], space: bool) -> None:
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.scores = dict(zip(tokens, scores, strict=True))
        self.space = " " if space else ""
        self.marks = {token for token, kind in zip(tokens, types, strict=True) if kind in MARKS}
        self.cut = re.compile("|".join(re.escape(mark) for mark in sorted(self.marks, key=len, reverse=True)) or "(?!)")

    def encode(self, text: str) -> list[int]:
        ids, start = [], 0
        for mark in self.cut.finditer(text):
            ids += [*self.words(text[start : mark.start()]), self.ids[mark[0]]]
            start = mark.end()
        return ids + self.words(text[start:])

    def words(self, text: str) -> list[int]:
        """Ids of a text without marks; what is no token becomes bytes."""
        if not text:
            return []
        found: list[int] = []
        for piece in join(list((self.space + text).replace(" ", SPACE)), self.scores):
            known = piece in self.ids
            found += [self.ids[piece]] if known else [self.ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
        return found


def join(pieces: list[str], scores: Mapping[str, float]) -> list[str]:
    """Characters joined to tokens: the pair with the highest score first, and of equals the left one."""
    before, behind = list(range(-1, len(pieces) - 1)), list(range(1, len(pieces) + 1))
    heap: list[tuple[float, int, str]] = []

    def offer(left: int) -> None:
        if left >= 0 and behind[left] < len(pieces) and (whole := pieces[left] + pieces[behind[left]]) in scores:
            heapq.heappush(heap, (-scores[whole], left, whole))

    for i in range(len(pieces) - 1):
        offer(i)
    while heap:
        _, left, whole = heapq.heappop(heap)
        right = behind[left]
        if not pieces[left] or right == len(pieces) or pieces[left] + pieces[right] != whole:
            continue  # one of the two has been joined to another since
        pieces[left], pieces[right], behind[left] = whole, "", behind[right]
        if behind[right] < len(pieces):
            before[behind[right]] = left
        offer(before[left])
        offer(left)
    return [piece for piece in pieces if piece]
