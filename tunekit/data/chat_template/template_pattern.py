"""Conversations of one shape (roles, fields, flags) are written alike: what is found of one holds for all.

It holds for a row if its text is, to the last character, the pieces of the template with the row's texts between them;
this is checked for each row, and is much faster than to find its turns.
"""

import json
import re
from collections.abc import Callable
from os.path import commonprefix
from typing import NamedTuple

from tunekit.data.chat_template.turn_boundaries import HIDDEN, HIDES, Span

Place = tuple[int, int]  # a piece, and a character in it
PAD = "\n \n"  # tells what of a text's edges a template takes away
CHANGES: tuple[Callable[[str], str], ...] = (
    lambda text: text,
    lambda text: text.strip(),
    lambda text: text.strip("\n"),
    lambda text: text.rstrip(),
    lambda text: text.lstrip(),
    lambda text: text.rstrip("\n"),
    lambda text: text.lstrip("\n"),
    lambda text: text.rstrip("\n").lstrip(),
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
)


class TemplatePattern(NamedTuple):
    """Pieces of a template, which text stands behind each but the last, and what the template does to it.

    `free` is the piece that the schemas of tools are written in, with what stands around these: they may be any.
    """

    pieces: list[str]
    order: list[int]
    changes: list[Callable[[str], str]]
    spans: list[tuple[Place, Place]]
    free: tuple[int, str, str] | None = None

    def fit(self, text: str, texts: list[str]) -> list[Span] | None:
        """The learnt characters of a row; None if it is not written like this."""
        parts = [self.pieces[0]]
        for which, change, piece in zip(self.order, self.changes, self.pieces[1:], strict=True):
            parts += (change(texts[which]), piece)
        if self.free is not None:
            piece, head, tail = self.free
            before, behind = "".join(parts[: 2 * piece]) + head, tail + "".join(parts[2 * piece + 1 :])
            if len(before) + len(behind) > len(text):
                return None
            parts[2 * piece] = head + text[len(before) : len(text) - len(behind)] + tail
        if "".join(parts) != text:
            return None
        starts, at = [], 0
        for number, part in enumerate(parts):
            if number % 2 == 0:
                starts.append(at)
            at += len(part)
        return [(starts[first] + low, starts[last] + high) for (first, low), (last, high) in self.spans]

    def freed(self, other: str) -> "TemplatePattern":
        """The same for any tools; `other` is the conversation with other ones. As it is, if they are not in one piece.

        Nothing may be learnt behind what the two have in common of that piece.
        """
        pieces = cut(other)[0]
        differ = [number for number, pair in enumerate(zip(self.pieces, pieces, strict=False)) if pair[0] != pair[1]]
        if len(pieces) != len(self.pieces) or cut(other)[1] != self.order or len(differ) != 1:
            return self
        one, two = self.pieces[differ[0]], pieces[differ[0]]
        head = commonprefix([one, two])
        tail = commonprefix([one[len(head) :][::-1], two[len(head) :][::-1]])[::-1]
        if any(piece == differ[0] and at > len(head) for span in self.spans for piece, at in span):
            return self
        return self._replace(free=(differ[0], head, tail))


def cut(text: str) -> tuple[list[str], list[int]]:
    """The pieces between hidden texts, and the numbers of these."""
    found = list(HIDES.finditer(text))
    starts, ends = [0, *(match.end() for match in found)], [*(match.start() for match in found), len(text)]
    pieces = [text[start:end] for start, end in zip(starts, ends, strict=True)]
    return pieces, [ord(match[1]) - HIDDEN for match in found]


def padded(number: int) -> str:
    return f'{PAD}{chr(HIDDEN + number)}"{PAD}'


def find_pattern(text: str, probe: str, spans: list[Span]) -> TemplatePattern | None:
    """The layout of a conversation whose texts are hidden, from what is learnt of it.

    `probe` is the same conversation with white space and a quote around each hidden text.
    """
    pieces, order = cut(text)
    ends = [0, *(match.end() for match in HIDES.finditer(text))]
    places = [(start, start + len(piece)) for start, piece in zip(ends, pieces, strict=True)]
    changes = probed(pieces, order, probe)
    if changes is None:
        return None
    return TemplatePattern(pieces, order, changes, [(find(places, start), find(places, end)) for start, end in spans])


def probed(pieces: list[str], order: list[int], probe: str) -> list[Callable[[str], str]] | None:
    """What the template does to each text; None if it is nothing that is known here."""
    pattern = [re.escape(pieces[0])]
    for number, piece in zip(order, pieces[1:], strict=True):
        forms = [re.escape(change(padded(number))) for change in CHANGES] + [f"{chr(HIDDEN + number)}{{2,}}"]
        pattern += ["(" + "|".join(f"({form})" for form in forms) + ")", re.escape(piece)]
    match = re.compile("".join(pattern)).fullmatch(probe)
    if match is None:
        return None
    made = (*CHANGES, CHANGES[0])  # a name has no white space around it
    step = len(made) + 1
    groups = [match.groups()[at * step + 1 : (at + 1) * step] for at in range(len(order))]
    return [next(change for change, form in zip(made, group, strict=True) if form is not None) for group in groups]


def find(places: list[Span], at: int) -> Place:
    """The piece that a character stands in. Between two pieces there is one hidden text."""
    return next((number, at - low) for number, (low, high) in enumerate(places) if low <= at <= high)
