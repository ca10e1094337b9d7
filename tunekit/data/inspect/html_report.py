"""HTML report of `tune data`: one self-contained file, with dark and light colors, for large and small screens."""

import html
from collections.abc import Iterator
from pathlib import Path

from tunekit.config.secrets import escape_control
from tunekit.data.check_target import Finding
from tunekit.data.inspect.examples import ExampleView, TokenSpan
from tunekit.data.inspect.report import DataReport
from tunekit.data.inspect.stats import DatasetStats, Histogram
from tunekit.data.inspect.token_display import DisplayToken, TokenRole, display_tokens, visible_text
from tunekit.data.tokenizer import Tokenizer

ASSETS_DIR = Path(__file__).parent
CSS_CLASSES = {TokenRole.CONTEXT: "", TokenRole.TARGET: "l", TokenRole.DROPPED: "d"}


def escape(text: str) -> str:
    """Text as HTML, with visible control characters."""
    return html.escape(escape_control(text))


def html_page(title: str, body: str, style: str = "", script: str = "") -> str:
    """A self-contained page with the style of reports.

    Its texts are untrusted. Should escaping fail, the page still cannot load or send anything.
    """
    policy = "default-src 'none'; style-src 'unsafe-inline'" + ("; script-src 'unsafe-inline'" if script else "")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{(ASSETS_DIR / "page.css").read_text("utf-8")}{style}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{body}
{f"<script>{script}</script>" if script else ""}
</body>
</html>
"""


def render_html(report: DataReport, title: str) -> str:
    """Return the HTML page of a report."""
    body = f"""<p class="faint">{escape(report.model)}</p>
{"".join(map(format_stats, report.stats))}
<h2>Findings</h2>
{"".join(map(format_finding, report.findings)) or '<p class="faint">no problems found</p>'}
<h2>Rows</h2>
<div class="bar"><i class="l">target</i> <i class="l s">&lt;end&gt;</i> <span>context</span>
<i class="s">&lt;special&gt;</i> <i class="d">truncated</i>
<label><input type="checkbox" id="bounds"> token boundaries</label></div>
{"".join(format_row(example, report.tokenizer) for example in (*report.rows, *report.examples))}
<div id="tip"></div>"""
    return html_page(title, body, script=(ASSETS_DIR / "page.js").read_text("utf-8"))


def format_stats(stats: DatasetStats) -> str:
    """Format the statistics and histograms of a dataset."""
    lines = "".join(f"<li>{escape(line)}</li>" for line in stats.lines())
    targets = stats.targets and format_histogram("target tokens per row", stats.targets, "target")
    return f"""<section class="card">
<h3>{escape(stats.config_key)} · {escape(stats.name)}</h3>
<div class="stats"><ul>{lines}</ul>
{format_histogram("tokens per row", stats.lengths)}
{targets or ""}</div>
</section>
"""


def format_histogram(title: str, bins: Histogram, css_class: str = "") -> str:
    max_count = max(bins.counts)
    bars = "".join(
        f'<tr><td>{name}</td><td><b style="width:{100 * count / max_count:.2f}%"></b></td><td>{count:,}</td></tr>'
        for name, count in zip(bins.labels(), bins.counts, strict=True)
    )
    return f'<figure class="{css_class}"><figcaption>{title}</figcaption><table>{bars}</table></figure>'


def format_finding(finding: Finding) -> str:
    """Format a finding with links to its rows."""
    key, severity = finding.config_key, finding.severity
    links = (f'<a href="#{anchor(key, location)}">{escape(location)}</a>' for location in finding.row_locations)
    return (
        f'<div class="finding {severity}"><strong>{severity}</strong> {escape(key)}: {escape(finding.message)}. '
        f'{escape(finding.hint)}.<br><span class="faint">{", ".join(links)}</span></div>\n'
    )


def anchor(config_key: str, location: str) -> str:
    """Return the id of a row's element."""
    return escape(f"{config_key}:{location}".replace(" ", "_"))


def format_row(example: ExampleView, tokenizer: Tokenizer) -> str:
    """Format a row and its tokens."""
    head = escape(example.location)
    if example.spans:
        head += f" · {example.token_counts}"
    remark = f'<p class="doubtful"><strong>{escape(example.remark)}</strong></p>' if example.remark else ""
    texts = ""
    for span in example.spans:
        texts += f"<h4>{escape(span.annotation)}</h4>" if span.annotation else ""
        texts += f'<p class="text">{"".join(format_tokens(span, tokenizer))}</p>'
    return (
        f'<section class="card row" id="{anchor(example.config_key, example.location)}"><h3>{example.name}</h3>'
        f'<div class="faint">{head}</div>{remark}{texts}</section>\n'
    )


def format_tokens(span: TokenSpan, tokenizer: Tokenizer) -> Iterator[str]:
    tokens = display_tokens(tokenizer, span.tokens, span.roles)
    for token, text in zip(tokens, visible_text(tokens), strict=True):
        ids, position = " ".join(map(str, token.ids)), token.index + 1
        yield f'<i{class_attribute(token)} n="{ids}" p="{position}">{escape(text)}</i>'


def class_attribute(token: DisplayToken) -> str:
    classes = " ".join(filter(None, (CSS_CLASSES[token.role], "s" if token.special else "")))
    return f' class="{classes}"' if classes else ""
