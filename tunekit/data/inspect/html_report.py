"""HTML report of `tune data`: one self-contained file, with dark and light colors, for large and small screens."""

from collections.abc import Iterator
from functools import partial

from tunekit.data.inspect.examples import TokenSpan
from tunekit.data.inspect.report import DataReport
from tunekit.data.inspect.token_display import TokenRole, display_tokens, visible_text
from tunekit.data.tokenizer import Tokenizer
from tunekit.templates.render import render_template

CSS_CLASSES = {TokenRole.CONTEXT: "", TokenRole.TARGET: "l", TokenRole.DROPPED: "d"}


def render_html(report: DataReport, title: str) -> str:
    """Return the HTML page of a report."""
    tokens = partial(token_elements, report.tokenizer)
    return render_template("data_report.html.j2", title=title, report=report, tokens=tokens, anchor=row_anchor)


def row_anchor(config_key: str, location: str) -> str:
    """Return the id of a row's element."""
    return f"{config_key}:{location}".replace(" ", "_")


def token_elements(tokenizer: Tokenizer, span: TokenSpan) -> Iterator[tuple[str, str, int, str]]:
    """CSS classes, token ids, position from 1 and text of each element; tokens of one character share one."""
    tokens = display_tokens(tokenizer, span.tokens, span.roles)
    for token, text in zip(tokens, visible_text(tokens), strict=True):
        classes = " ".join(filter(None, (CSS_CLASSES[token.role], "s" if token.special else "")))
        yield classes, " ".join(map(str, token.ids)), token.index + 1, text
