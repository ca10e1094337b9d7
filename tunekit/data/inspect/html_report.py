"""The view of `tune data` as one HTML file: it loads nothing, and works on a phone, in the dark and by light."""

from collections.abc import Iterator
from html import escape
from pathlib import Path

from tunekit.data.inspect.examples import ExampleView, TokenSpan
from tunekit.data.inspect.report import DataReport
from tunekit.data.inspect.stats import DatasetStats, Histogram
from tunekit.data.inspect.token_display import DisplayToken, TokenRole, display_tokens, visible_text
from tunekit.data.row_checks import Finding
from tunekit.data.tokenizer import Tokenizer

HERE = Path(__file__).parent
KIND = {TokenRole.CONTEXT: "", TokenRole.LEARNT: "l", TokenRole.DROPPED: "d"}
# Rows are other people's text: whatever gets through the escapes, nothing is loaded and nothing is sent.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def render_html(view: DataReport, title: str) -> str:
    """The page."""
    style, script = ((HERE / name).read_text("utf-8") for name in ("page.css", "page.js"))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p class="faint">{escape(view.model)}</p>
{"".join(map(card, view.figures))}
<h2>Findings</h2>
{"".join(finding(one, view) for one in view.findings) or '<p class="faint">nothing wrong was found</p>'}
<h2>Rows</h2>
<div class="bar"><i class="l">learnt</i> <i class="l s">&lt;end&gt;</i> <span>context</span>
<i class="s">&lt;special&gt;</i> <i class="d">cut off</i>
<label><input type="checkbox" id="bounds"> bounds of tokens</label></div>
{"".join(row(one, view.tokenizer) for one in (*view.rows, *view.examples))}
<div id="tip"></div>
<script>
{script}</script>
</body>
</html>
"""


def card(of: DatasetStats) -> str:
    """Figures of a part, with its lengths."""
    lines = "".join(f"<li>{escape(line)}</li>" for line in of.lines())
    return f"""<section class="card">
<h3>{escape(of.part)} · {escape(of.name)}</h3>
<div class="figures"><ul>{lines}</ul>
{histogram("tokens in a row", of.lengths)}
{histogram("learnt tokens in a row", of.targets, "learnt")}</div>
</section>
"""


def histogram(title: str, of: Histogram, kind: str = "") -> str:
    most = max(of.counts)
    bars = "".join(
        f'<tr><td>{name}</td><td><b style="width:{100 * count / most:.2f}%"></b></td><td>{count:,}</td></tr>'
        for name, count in zip(of.names(), of.counts, strict=True)
    )
    return f'<figure class="{kind}"><figcaption>{title}</figcaption><table>{bars}</table></figure>'


def finding(one: Finding, view: DataReport) -> str:
    """A finding, with ways to the rows it names."""
    ways = (f'<a href="#{anchor(one.part, place)}">{escape(place)}</a>' for place in one.where)
    return (
        f'<div class="finding {one.severity}"><strong>{one.severity}</strong> {escape(one.part)}: {escape(one.says)}; '
        f'{escape(one.mend)}<br><span class="faint">{", ".join(ways)}</span></div>\n'
    )


def anchor(part: str, where: str) -> str:
    """The name of a row within the page."""
    return escape(f"{part}:{where}".replace(" ", "_"), quote=True)


def row(one: ExampleView, tokenizer: Tokenizer) -> str:
    """A row and its tokens."""
    head = f"{escape(one.where)} · {one.tokens:,} tokens, {one.learnt:,} learnt" if one.stretches else escape(one.where)
    remark = f'<p class="doubtful"><strong>{escape(one.remark)}</strong></p>' if one.remark else ""
    texts = "".join(
        f'{told(stretch)}<p class="text">{"".join(marks(stretch, tokenizer))}</p>' for stretch in one.stretches
    )
    return (
        f'<section class="card row" id="{anchor(one.part, one.where)}"><h3>{one.name}</h3>'
        f'<div class="faint">{head}</div>{remark}{texts}</section>\n'
    )


def told(stretch: TokenSpan) -> str:
    """What the row says of a document."""
    return f"<h4>{escape(stretch.told)}</h4>" if stretch.told else ""


def marks(stretch: TokenSpan, tokenizer: Tokenizer) -> Iterator[str]:
    found = display_tokens(tokenizer, stretch.tokens, stretch.states)
    for piece, text in zip(found, visible_text(found), strict=True):
        yield f'<i{named(piece)} n="{" ".join(map(str, piece.ids))}" p="{piece.at + 1}">{escape(text, quote=False)}</i>'


def named(piece: DisplayToken) -> str:
    kinds = " ".join(filter(None, (KIND[piece.state], "s" if piece.special else "")))
    return f' class="{kinds}"' if kinds else ""
