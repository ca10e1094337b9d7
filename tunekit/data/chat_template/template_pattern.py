"""Patterns of rendered conversations: conversations of one shape (roles, fields, flags) share their template text.

A pattern applies to a row if the row's text is exactly the literals of the pattern with the row's texts between them.
Checking this for each row is much faster than finding turn boundaries.
"""

import json
import re
from collections.abc import Callable
from os.path import commonprefix
from typing import NamedTuple

from tunekit.data.chat_template.turn_boundaries import SENTINEL_BASE, SENTINELS, Span

LiteralOffset = tuple[int, int]  # index of a literal, and a character offset in it
PADDING = "\n \n"  # shows what a template strips from a text
TRANSFORMS: tuple[Callable[[str], str], ...] = (
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
    """Literal strings of a template, alternating with message texts."""

    literals: list[str]
    text_indices: list[int]  # which text follows each literal but the last
    transforms: list[Callable[[str], str]]  # what the template does to each of these texts
    spans: list[tuple[LiteralOffset, LiteralOffset]]
    tools_slot: tuple[int, str, str] | None = (
        None  # literal with any tool schemas, and the strings before and after them
    )

    def match(self, text: str, texts: list[str]) -> list[Span] | None:
        """Return the spans in a row's text; None if the text does not match the pattern."""
        parts = [self.literals[0]]
        for index, transform, literal in zip(self.text_indices, self.transforms, self.literals[1:], strict=True):
            parts += (transform(texts[index]), literal)
        if self.tools_slot is not None:
            literal, head, tail = self.tools_slot
            before, after = "".join(parts[: 2 * literal]) + head, tail + "".join(parts[2 * literal + 1 :])
            if len(before) + len(after) > len(text):
                return None
            parts[2 * literal] = head + text[len(before) : len(text) - len(after)] + tail
        if "".join(parts) != text:
            return None
        starts, offset = [], 0
        for number, part in enumerate(parts):
            if number % 2 == 0:
                starts.append(offset)
            offset += len(part)
        return [(starts[first] + low, starts[last] + high) for (first, low), (last, high) in self.spans]

    def with_any_tools(self, other_text: str) -> "TemplatePattern":
        """Return a pattern that matches any tool schemas. `other_text` is the same conversation with other tools.

        Return self if the texts differ in more than one literal, or if a span has a boundary after the tool schemas.
        """
        literals, text_indices = split_at_sentinels(other_text)
        pairs = enumerate(zip(self.literals, literals, strict=False))
        differing = [index for index, (literal, other) in pairs if literal != other]
        if len(literals) != len(self.literals) or text_indices != self.text_indices or len(differing) != 1:
            return self
        first, second = self.literals[differing[0]], literals[differing[0]]
        head = commonprefix([first, second])
        tail = commonprefix([first[len(head) :][::-1], second[len(head) :][::-1]])[::-1]
        if any(literal == differing[0] and offset > len(head) for span in self.spans for literal, offset in span):
            return self
        return self._replace(tools_slot=(differing[0], head, tail))


def split_at_sentinels(text: str) -> tuple[list[str], list[int]]:
    """Return the literals between sentinels, and the numbers of the sentinels."""
    matches = list(SENTINELS.finditer(text))
    starts, ends = [0, *(match.end() for match in matches)], [*(match.start() for match in matches), len(text)]
    literals = [text[start:end] for start, end in zip(starts, ends, strict=True)]
    return literals, [ord(match[1]) - SENTINEL_BASE for match in matches]


def padded_sentinel(number: int) -> str:
    return f'{PADDING}{chr(SENTINEL_BASE + number)}"{PADDING}'


def find_pattern(text: str, probe: str, spans: list[Span]) -> TemplatePattern | None:
    """Build the pattern of a rendered conversation with sentinels, whose spans are given; None if there is none.

    `probe` is the same conversation with whitespace and a quote around each sentinel.
    """
    literals, text_indices = split_at_sentinels(text)
    ends = [0, *(match.end() for match in SENTINELS.finditer(text))]
    literal_spans = [(start, start + len(literal)) for start, literal in zip(ends, literals, strict=True)]
    transforms = detect_transforms(literals, text_indices, probe)
    if transforms is None:
        return None
    offsets = [(locate_literals(literal_spans, start), locate_literals(literal_spans, end)) for start, end in spans]
    return TemplatePattern(literals, text_indices, transforms, offsets)


def detect_transforms(literals: list[str], text_indices: list[int], probe: str) -> list[Callable[[str], str]] | None:
    """Return the transform of each text; None if one of them is not in TRANSFORMS."""
    pattern = [re.escape(literals[0])]
    for index, literal in zip(text_indices, literals[1:], strict=True):
        forms = [re.escape(transform(padded_sentinel(index))) for transform in TRANSFORMS]
        forms.append(f"{chr(SENTINEL_BASE + index)}{{2,}}")
        pattern += ["(" + "|".join(f"({form})" for form in forms) + ")", re.escape(literal)]
    match = re.compile("".join(pattern)).fullmatch(probe)
    if match is None:
        return None
    candidates = (*TRANSFORMS, TRANSFORMS[0])  # the last form is a name, which is not padded
    group_size = len(candidates) + 1
    ends = range(group_size, (len(text_indices) + 1) * group_size, group_size)
    groups = [match.groups()[end - group_size + 1 : end] for end in ends]
    return [
        next(candidate for candidate, form in zip(candidates, group, strict=True) if form is not None)
        for group in groups
    ]


def locate_literals(literal_spans: list[Span], offset: int) -> LiteralOffset:
    """Return the literal that contains a character, and the offset in it. One sentinel separates two literals."""
    return next((number, offset - low) for number, (low, high) in enumerate(literal_spans) if low <= offset <= high)
