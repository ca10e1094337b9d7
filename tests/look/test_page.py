"""The page: it holds every token, obeys none of them, and asks nothing of the network."""

import re
from html.parser import HTMLParser

from tunekit import assets
from tunekit.data.dataloader.summary import DatasetSummary
from tunekit.data.inspect import html_report
from tunekit.data.inspect.examples import ExampleView, TokenSpan
from tunekit.data.inspect.report import DataReport
from tunekit.data.inspect.stats import DatasetStats, Histogram
from tunekit.data.readers.row_reader import BadRow
from tunekit.data.row_checks import Finding
from tunekit.data.tokenizer import Tokenizer

EVIL = '</p><script>alert(1)</script> & "quotes" <img src=x onerror=alert(2)> \u202e'


class Reader(HTMLParser):
    """Tokens, links, ids and the elements that are open."""

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
        told = dict(attributes)
        self.seen.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "i" and "n" in told:
            self.ids.append(list(map(int, (told["n"] or "").split())))
            self.texts.append("")
        self.names.add(told.get("id") or "")
        self.links += [told["href"] or ""] if "href" in told else []
        assert "src" not in told and not [name for name in told if name.startswith("on")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "i" and self.texts:
            self.texts[-1] += data


def view(text: str) -> DataReport:
    folder = assets.model_dir("tunekit/nano")
    assert folder is not None
    tokenizer = Tokenizer.open(folder)
    ids = tokenizer.encode(text)
    rows = tuple(
        ExampleView("data", f"{text[:20]}:{number}", (TokenSpan(ids, [number % 3] * len(ids)),), "cut", number)
        for number in range(1, 4)
    )
    bars = Histogram((0, 10, 20), (3, 0))
    share, bad = DatasetSummary(text, text, 3, 30, 9, 1.0), BadRow(text, text)
    counts = 64, 1, 3, 30, 9, 12, 10, 1, 2, 1, 0.5, 4, 1
    figures = DatasetStats("data", text, (share, share), False, (bad,), *counts, bars, bars)
    finding = Finding("doubtful", "x", "data", text, text, 3, 1.0, (0,), (rows[0].where,))
    return DataReport("tunekit/nano", tokenizer, (figures,), (finding,), rows, ())


def read(text: str) -> tuple[Reader, str]:
    html = html_report.render_html(view(text), text)
    reader = Reader()
    reader.feed(html)
    assert not reader.open
    return reader, html


def test_rows_are_text_whatever_they_hold() -> None:
    reader, _ = read(EVIL)
    assert reader.seen.count("script") == 1 and "img" not in reader.seen


def test_every_token_is_there_in_order() -> None:
    reader, _ = read("Hello, naïve 😀!")
    folder = assets.model_dir("tunekit/nano")
    assert folder is not None
    wanted = Tokenizer.open(folder).encode("Hello, naïve 😀!")
    assert [token for piece in reader.ids for token in piece] == wanted * 3
    assert "".join(reader.texts) == "Hello, naïve 😀!" * 3


def test_findings_lead_to_their_rows() -> None:
    reader, _ = read("Hello there")
    assert reader.links and all(link.startswith("#") and link[1:] in reader.names for link in reader.links)


def test_nothing_is_fetched() -> None:
    _, html = read("Hello there")
    assert "default-src 'none'" in html and not re.search(r"https?://|url\(|@import|<link|<img", html)
