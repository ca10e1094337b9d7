"""The HTML report shows every token, escapes all markup, and loads nothing from the network."""

import re
from html.parser import HTMLParser

from tunekit import assets
from tunekit.data.check_target import Finding
from tunekit.data.dataloader.summary import DatasetSummary
from tunekit.data.inspect import html_report
from tunekit.data.inspect.examples import ExampleView, TokenSpan
from tunekit.data.inspect.report import DataReport
from tunekit.data.inspect.stats import DatasetStats, Histogram
from tunekit.data.readers.row_reader import BadRow
from tunekit.data.tokenizer import Tokenizer

EVIL = '</p><script>alert(1)</script> & "quotes" <img src=x onerror=alert(2)> \u202e'


class Reader(HTMLParser):
    """Collect tokens, links, ids and open elements."""

    VOID = ("meta", "input", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[list[int]] = []
        self.texts: list[str] = []
        self.names: set[str] = set()
        self.links: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        attrs = dict(attributes)
        self.seen.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "i" and "n" in attrs:
            self.ids.append(list(map(int, (attrs["n"] or "").split())))
            self.texts.append("")
        self.names.add(attrs.get("id") or "")
        self.links += [attrs["href"] or ""] if "href" in attrs else []
        assert "src" not in attrs and not [name for name in attrs if name.startswith("on")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "i" and self.texts:
            self.texts[-1] += data


def make_report(text: str) -> DataReport:
    folder = assets.model_dir("tunekit/nano")
    assert folder is not None
    tokenizer = Tokenizer.open(folder)
    ids = tokenizer.encode(text)
    rows = tuple(
        ExampleView("data", f"{text[:20]}:{number}", (TokenSpan(ids, [number % 3] * len(ids)),), "cut", number)
        for number in range(1, 4)
    )
    hist = Histogram((0, 10, 20), (3, 0))
    summary, bad_row = DatasetSummary(text, text, 3, 30, 9, 1.0), BadRow(text, text)
    counts = 64, 1, 3, 30, 9, 12, 10, 1, 2, 1, 0.5, 4, 1
    stats = DatasetStats("data", text, (summary, summary), False, (bad_row,), *counts, hist, hist)
    finding = Finding("doubtful", "x", "data", text, text, 3, 1.0, (0,), (rows[0].location,))
    return DataReport("tunekit/nano", tokenizer, (stats,), (finding,), rows, ())


def render(text: str) -> tuple[Reader, str]:
    html = html_report.render_html(make_report(text), text)
    reader = Reader()
    reader.feed(html)
    assert not reader.open
    return reader, html


def test_markup_in_rows_is_escaped() -> None:
    reader, _ = render(EVIL)
    assert reader.seen.count("script") == 1 and "img" not in reader.seen


def test_all_tokens_are_shown_in_order() -> None:
    reader, _ = render("Hello, naïve 😀!")
    folder = assets.model_dir("tunekit/nano")
    assert folder is not None
    expected = Tokenizer.open(folder).encode("Hello, naïve 😀!")
    assert [token for token_ids in reader.ids for token in token_ids] == expected * 3
    assert "".join(reader.texts) == "Hello, naïve 😀!" * 3


def test_findings_link_to_their_rows() -> None:
    reader, _ = render("Hello there")
    assert reader.links and all(link.startswith("#") and link[1:] in reader.names for link in reader.links)


def test_page_fetches_nothing() -> None:
    _, html = render("Hello there")
    assert "default-src 'none'" in html and not re.search(r"https?://|url\(|@import|<link|<img", html)
