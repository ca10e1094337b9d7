"""Terminal output of rows, statistics, and findings: with colors, or with brackets if colors are unavailable."""

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from tunekit.config.secrets import escape_control
from tunekit.data.check_target import Finding
from tunekit.data.inspect.examples import ExampleView, TokenSpan
from tunekit.data.inspect.stats import DatasetStats, Histogram
from tunekit.data.inspect.token_display import DisplayToken, TokenRole, display_tokens, visible_text
from tunekit.data.tokenizer import Tokenizer

BAR = " ▏▎▍▌▋▊▉█"
EDGE_TOKENS = 60  # tokens shown at both ends of a long group of one role
MIN_HIDDEN_TOKENS = 40  # do not hide fewer tokens than this
RESET = "\x1b[0m"
FAINT, BOLD = "\x1b[2m", "\x1b[1m"
# Target tokens alternate between two shades of green, so that their boundaries are visible on dark and light terminals.
TARGET_STYLES = "\x1b[38;5;16;48;5;151m", "\x1b[38;5;16;48;5;114m"
TARGET_SPECIAL = "\x1b[1;38;5;231;48;5;28m"  # special target tokens
SPECIAL = "\x1b[38;5;68m"
DROPPED = "\x1b[9;38;5;167m"
SEVERITY_STYLES = {"wrong": "\x1b[1;38;5;167m", "doubtful": "\x1b[38;5;172m", "note": FAINT}
BRACKETS = {TokenRole.TARGET: ("⟦", "⟧"), TokenRole.DROPPED: ("⟪", "⟫"), TokenRole.CONTEXT: ("", "")}


@dataclass(frozen=True)
class TerminalSize:
    """Width of a terminal in columns, and whether it supports colors."""

    width: int
    has_color: bool

    def paint(self, style: str, text: str) -> str:
        return f"{style}{text}{RESET}" if self.has_color and style and text else text


def format_row(example: ExampleView, tokenizer: Tokenizer, terminal: TerminalSize, full: bool = True) -> Iterator[str]:
    """Format a row as lines. Unless `full`, the middle of long groups of tokens of one role is hidden."""
    summary = escape_control(example.location)
    if example.spans:
        summary += f"  {example.token_counts}"
    yield terminal.paint(BOLD, example.name) + f"  {summary}"
    if example.remark:
        yield from wrap_text(example.remark, terminal, SEVERITY_STYLES["doubtful"])
    for span in example.spans:
        if span.annotation:
            yield terminal.paint(BOLD, f"{span.annotation}:")
        yield from wrap_tokens(styled_tokens(span, tokenizer, terminal, full), terminal)
    yield ""


def styled_tokens(
    span: TokenSpan, tokenizer: Tokenizer, terminal: TerminalSize, full: bool
) -> Iterator[tuple[str, str]]:
    """Yield the style and text of each visible token, with brackets if there are no colors."""
    tokens = display_tokens(tokenizer, span.tokens, span.roles)
    for group in (list(group) for _, group in groupby(tokens, key=lambda token: token.role)):
        opening, closing = ("", "") if terminal.has_color else BRACKETS[group[0].role]
        texts, tail_start = visible_text(group), len(group) - EDGE_TOKENS
        is_shortened = not full and tail_start > EDGE_TOKENS + MIN_HIDDEN_TOKENS
        for index, (token, text) in enumerate(zip(group, texts, strict=True)):
            if is_shortened and EDGE_TOKENS <= index < tail_start:
                if index == EDGE_TOKENS:
                    yield FAINT, f" ⋯ {tail_start - EDGE_TOKENS:,} more ⋯ "
                continue
            prefix, suffix = opening if index == 0 else "", closing if index + 1 == len(group) else ""
            yield token_style(token, index), f"{prefix}{text}{suffix}"


def token_style(token: DisplayToken, index: int) -> str:
    if token.role is TokenRole.DROPPED:
        return DROPPED
    if token.role is TokenRole.TARGET:
        return TARGET_SPECIAL if token.special else TARGET_STYLES[index % 2]
    return SPECIAL if token.special else ""


def wrap_tokens(tokens: Iterator[tuple[str, str]], terminal: TerminalSize) -> Iterator[str]:
    """Wrap tokens into lines. A token that fits in a line is not split."""
    line, used = "", 0
    for style, text in tokens:
        for index, text_line in enumerate(text.split("\n")):
            if index:
                yield line
                line, used = "", 0
            for chunk in split_by_width(text_line, terminal.width):
                width = display_width(chunk)
                if used and used + width > terminal.width:
                    yield line
                    line, used = "", 0
                line, used = line + terminal.paint(style, chunk), used + width
    if line:
        yield line


def split_by_width(text: str, width: int) -> Iterator[str]:
    """Split a text into chunks of at most `width` columns."""
    chunk, used = "", 0
    for character in text:
        size = display_width(character)
        if used + size > width:
            yield chunk
            chunk, used = "", 0
        chunk, used = chunk + character, used + size
    if chunk:
        yield chunk


def display_width(text: str) -> int:
    """Return the number of terminal columns of a text."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(unicodedata.combining(character) > 0 for character in text)


def wrap_text(text: str, terminal: TerminalSize, style: str = "", indent: int = 0) -> Iterator[str]:
    """Wrap a text at spaces into lines that are indented by `indent` columns."""
    margin = " " * indent
    line = margin
    for word in escape_control(text).split(" "):
        if line != margin and display_width(line) + display_width(word) >= terminal.width:
            yield terminal.paint(style, line)
            line = margin
        line = f"{line} {word}" if line != margin else line + word
    yield terminal.paint(style, line)


def format_stats(stats: DatasetStats, terminal: TerminalSize) -> Iterator[str]:
    """Format the statistics and histograms of a dataset."""
    yield terminal.paint(BOLD, stats.config_key) + f"  {escape_control(stats.name)}"
    for line in stats.lines():
        yield from wrap_text(line, terminal, indent=2)
    yield ""
    yield from format_histograms(stats, terminal)
    yield ""


def format_histograms(stats: DatasetStats, terminal: TerminalSize) -> list[str]:
    """Format the histograms of row lengths and target tokens, side by side if the terminal is wide enough."""
    side = (terminal.width - 6) // 2 if terminal.width >= 76 else terminal.width - 2
    left = format_histogram("tokens per row", stats.lengths, side)
    if stats.targets is None:
        return [f"  {line}" for line in left]
    right = format_histogram("target tokens per row", stats.targets, side)
    if terminal.width < 76:
        return [f"  {line}" for line in [*left, "", *right]]
    height = max(len(left), len(right))
    left, right = (side + [""] * (height - len(side)) for side in (left, right))
    return [f"  {left_line:{side}}  {right_line}".rstrip() for left_line, right_line in zip(left, right, strict=True)]


def format_histogram(title: str, bins: Histogram, width: int) -> list[str]:
    """Format a histogram as a title and one bar per bin."""
    labels, counts = bins.labels(), [f"{count:,}" for count in bins.counts]
    label_width, count_width, max_count = max(map(len, labels)), max(map(len, counts)), max(bins.counts)
    bar_width = max(8, min(width - label_width - count_width - 2, 40))
    bars = [f"{label:>{label_width}} {draw_bar(count / max_count, bar_width):{bar_width}} {text:>{count_width}}"
            for label, count, text in zip(labels, bins.counts, counts, strict=True)]  # fmt: skip
    return [title, *bars]


def draw_bar(fraction: float, width: int) -> str:
    """Draw a bar in steps of 1/8 column. Fractions above 0 have at least one step."""
    eighths = round(fraction * width * 8)
    eighths = max(eighths, 1) if fraction > 0 else 0
    return BAR[8] * (eighths // 8) + (BAR[eighths % 8] if eighths % 8 else "")


def format_findings(findings: Sequence[Finding], terminal: TerminalSize) -> Iterator[str]:
    """Format each finding as a paragraph."""
    for finding in findings:
        yield terminal.paint(SEVERITY_STYLES[finding.severity], finding.severity)
        yield from wrap_text(str(finding), terminal, indent=2)
    if not findings:
        yield "no problems found"


def format_legend(terminal: TerminalSize) -> str:
    """Explain the colors or brackets."""
    if not terminal.has_color:
        return "⟦target⟧ context ⟪truncated⟫"
    paint = terminal.paint
    target = paint(TARGET_STYLES[0], "tar") + paint(TARGET_STYLES[1], "get")
    special, truncated = paint(SPECIAL, "<special>"), paint(DROPPED, "truncated")
    return f"{target} {paint(TARGET_SPECIAL, '<end>')} context {special} {truncated}"
