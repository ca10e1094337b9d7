"""Rows, figures and findings as text for a terminal: coloured, or with brackets where there are no colours."""

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tunekit.data.inspect.examples import ExampleView, TokenSpan
from tunekit.data.inspect.stats import DatasetStats, Histogram
from tunekit.data.inspect.token_display import DisplayToken, TokenRole, display_tokens, visible_text
from tunekit.data.row_checks import Finding
from tunekit.data.tokenizer import Tokenizer

BAR = " ▏▎▍▌▋▊▉█"
NEAR, FAR = 60, 40  # tokens shown at both ends of a stretch of one kind; fewer than these are not left out
RESET = "\x1b[0m"
FAINT, BOLD = "\x1b[2m", "\x1b[1m"
# Learnt tokens are black on two greens by turns, so that their bounds show on dark and light terminals alike.
GREENS = "\x1b[38;5;16;48;5;151m", "\x1b[38;5;16;48;5;114m"
END = "\x1b[1;38;5;231;48;5;28m"  # a special token that is learnt
SPECIAL = "\x1b[38;5;68m"
CUT = "\x1b[9;38;5;167m"
SEVERITY = {"wrong": "\x1b[1;38;5;167m", "doubtful": "\x1b[38;5;172m", "note": FAINT}
BRACKETS = {TokenRole.LEARNT: ("⟦", "⟧"), TokenRole.DROPPED: ("⟪", "⟫"), TokenRole.CONTEXT: ("", "")}


@dataclass(frozen=True)
class TerminalSize:
    """How wide the terminal is, in columns, and whether it has colours."""

    width: int
    coloured: bool

    def paint(self, style: str, text: str) -> str:
        return f"{style}{text}{RESET}" if self.coloured and style and text else text


def format_row(one: ExampleView, tokenizer: Tokenizer, screen: TerminalSize, whole: bool = True) -> Iterator[str]:
    """Lines of a row. Unless `whole`, the middle of long stretches of one kind is left out."""
    told = f"{one.where}  {one.tokens:,} tokens, {one.learnt:,} learnt" if one.stretches else one.where
    yield screen.paint(BOLD, one.name) + f"  {told}"
    if one.remark:
        yield from wrapped(one.remark, screen, SEVERITY["doubtful"])
    for stretch in one.stretches:
        if stretch.told:
            yield screen.paint(BOLD, f"{stretch.told}:")
        yield from lines(cells(stretch, tokenizer, screen, whole), screen)
    yield ""


def cells(stretch: TokenSpan, tokenizer: Tokenizer, screen: TerminalSize, whole: bool) -> Iterator[tuple[str, str]]:
    """Style and text of every token that is shown, with brackets where there are no colours."""
    found = display_tokens(tokenizer, stretch.tokens, stretch.states)
    for group in stretches(found):
        opened, closed = ("", "") if screen.coloured else BRACKETS[group[0].state]
        texts, behind = visible_text(group), len(group) - NEAR
        elided = not whole and behind > NEAR + FAR
        for at, (piece, text) in enumerate(zip(group, texts, strict=True)):
            if elided and NEAR <= at < behind:
                if at == NEAR:
                    yield FAINT, f" ⋯ {behind - NEAR:,} more ⋯ "
                continue
            front, back = opened if at == 0 else "", closed if at + 1 == len(group) else ""
            yield style(piece, at), f"{front}{text}{back}"


def stretches(found: Sequence[DisplayToken]) -> Iterator[list[DisplayToken]]:
    """Neighbours of one kind."""
    group: list[DisplayToken] = []
    for piece in found:
        if group and piece.state is not group[0].state:
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


def style(piece: DisplayToken, at: int) -> str:
    if piece.state is TokenRole.DROPPED:
        return CUT
    if piece.state is TokenRole.LEARNT:
        return END if piece.special else GREENS[at % 2]
    return SPECIAL if piece.special else ""


def lines(parts: Iterator[tuple[str, str]], screen: TerminalSize) -> Iterator[str]:
    """Text of tokens in lines that fit; a token goes to the next line whole, if it fits there."""
    line, used = "", 0
    for style, text in parts:
        for index, part in enumerate(text.split("\n")):
            if index:
                yield line
                line, used = "", 0
            for chunk in chopped(part, screen.width):
                size = columns(chunk)
                if used and used + size > screen.width:
                    yield line
                    line, used = "", 0
                line, used = line + screen.paint(style, chunk), used + size
    if line:
        yield line


def chopped(text: str, width: int) -> Iterator[str]:
    """A text in parts of at most `width` columns."""
    part, used = "", 0
    for character in text:
        size = columns(character)
        if used + size > width:
            yield part
            part, used = "", 0
        part, used = part + character, used + size
    if part:
        yield part


def columns(text: str) -> int:
    """Columns that a terminal takes for a text."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(unicodedata.combining(character) > 0 for character in text)


def wrapped(text: str, screen: TerminalSize, style: str = "", indent: int = 0) -> Iterator[str]:
    """Words in lines, all `indent` columns in."""
    front = " " * indent
    line = front
    for word in text.split(" "):
        if line != front and columns(line) + columns(word) >= screen.width:
            yield screen.paint(style, line)
            line = front
        line = f"{line} {word}" if line != front else line + word
    yield screen.paint(style, line)


def format_stats(of: DatasetStats, screen: TerminalSize) -> Iterator[str]:
    """What a part of the config holds."""
    yield screen.paint(BOLD, of.part) + f"  {of.name}"
    for line in of.lines():
        yield from wrapped(line, screen, indent=2)
    yield ""
    yield from histograms(of, screen)
    yield ""


def histograms(of: DatasetStats, screen: TerminalSize) -> list[str]:
    """Lengths of rows, and beside them, or below where it is too narrow, how many of the tokens are learnt."""
    side = (screen.width - 6) // 2 if screen.width >= 76 else screen.width - 2
    left = histogram("tokens in a row", of.lengths, side)
    right = histogram("learnt tokens in a row", of.targets, side)
    if screen.width < 76:
        return [f"  {line}" for line in [*left, "", *right]]
    height = max(len(left), len(right))
    left, right = (side + [""] * (height - len(side)) for side in (left, right))
    return [f"  {one:{side}}  {other}".rstrip() for one, other in zip(left, right, strict=True)]


def histogram(title: str, of: Histogram, width: int) -> list[str]:
    """A bar for each range of lengths."""
    names, counts = of.names(), [f"{count:,}" for count in of.counts]
    name, number, most = max(map(len, names)), max(map(len, counts)), max(of.counts)
    room = max(8, min(width - name - number - 2, 40))
    bars = [f"{label:>{name}} {bar(count / most, room):{room}} {text:>{number}}"
            for label, count, text in zip(names, of.counts, counts, strict=True)]  # fmt: skip
    return [title, *bars]


def bar(share: float, width: int) -> str:
    """A bar of eighths of a column; what is there at all shows."""
    eighths = round(share * width * 8)
    eighths = max(eighths, 1) if share > 0 else 0
    return BAR[8] * (eighths // 8) + (BAR[eighths % 8] if eighths % 8 else "")


def format_findings(found: Sequence[Finding], screen: TerminalSize) -> Iterator[str]:
    """A paragraph each, the worst first."""
    for one in found:
        yield screen.paint(SEVERITY[one.severity], one.severity)
        yield from wrapped(str(one), screen, indent=2)
    if not found:
        yield "nothing wrong was found"


def format_legend(screen: TerminalSize) -> str:
    """What the colours, or the brackets, mean."""
    if not screen.coloured:
        return "⟦learnt⟧ context ⟪cut⟫"
    paint = screen.paint
    learnt = paint(GREENS[0], "lear") + paint(GREENS[1], "nt")
    return f"{learnt} {paint(END, '<end>')} context {paint(SPECIAL, '<special>')} {paint(CUT, 'cut')}"
