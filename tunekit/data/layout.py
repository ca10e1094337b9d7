"""Conversations of one shape (roles, fields, flags) are written alike: what is found of one holds for all.

It holds for a row if its text is, to the last character, the pieces of the template with the row's texts between them;
this is checked for each row, and is much faster than to find its turns.
"""

import json
import re
from collections.abc import Callable
from typing import NamedTuple

from tunekit.data.turns import HIDDEN, HIDES, Span

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


class Layout(NamedTuple):
    """Pieces of a template, which text stands behind each but the last, and what the template does to it."""

    pieces: list[str]
    order: list[int]
    changes: list[Callable[[str], str]]
    spans: list[tuple[Place, Place]]

    def fit(self, text: str, texts: list[str]) -> list[Span] | None:
        """The learnt characters of a row; None if it is not written like this."""
        parts = [self.pieces[0]]
        for which, change, piece in zip(self.order, self.changes, self.pieces[1:], strict=True):
            parts += (change(texts[which]), piece)
        if "".join(parts) != text:
            return None
        starts, at = [], 0
        for number, part in enumerate(parts):
            if number % 2 == 0:
                starts.append(at)
            at += len(part)
        return [(starts[first] + low, starts[last] + high) for (first, low), (last, high) in self.spans]


def padded(number: int) -> str:
    return f'{PAD}{chr(HIDDEN + number)}"{PAD}'


def layout(text: str, probe: str, spans: list[Span]) -> Layout | None:
    """The layout of a conversation whose texts are hidden, from what is learnt of it.

    `probe` is the same conversation with white space and a quote around each hidden text.
    """
    pieces = HIDES.split(text)
    order = [ord(char) - HIDDEN for char in HIDES.findall(text)]
    places, at = [], 0
    for piece in pieces:
        places.append((at, at + len(piece)))
        at += len(piece) + 1
    changes = probed(pieces, order, probe)
    if changes is None:
        return None
    return Layout(pieces, order, changes, [(find(places, start), find(places, end)) for start, end in spans])


def probed(pieces: list[str], order: list[int], probe: str) -> list[Callable[[str], str]] | None:
    """What the template does to each text; None if it is nothing that is known here."""
    pattern = [re.escape(pieces[0])]
    for number, piece in zip(order, pieces[1:], strict=True):
        forms = [re.escape(change(padded(number))) for change in CHANGES]
        pattern += ["(" + "|".join(f"({form})" for form in forms) + ")", re.escape(piece)]
    match = re.compile("".join(pattern)).fullmatch(probe)
    if match is None:
        return None
    step = len(CHANGES) + 1
    groups = [match.groups()[at * step + 1 : (at + 1) * step] for at in range(len(order))]
    return [next(change for change, form in zip(CHANGES, group, strict=True) if form is not None) for group in groups]


def find(places: list[Span], at: int) -> Place:
    """The piece that a character stands in. Between two pieces there is one hidden text."""
    return next((number, at - low) for number, (low, high) in enumerate(places) if low <= at <= high)
