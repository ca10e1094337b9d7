"""Probabilities of the tokens of an answer, compared with transformers, and the page that shows them."""

from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.random_checkpoints import load_model, make_checkpoint, random_tokens
from tunekit import assets
from tunekit.data.tokenizer import Tokenizer
from tunekit.generation.token_image import draw_probabilities, place_cells
from tunekit.generation.token_probabilities import TokenProbability, render_probabilities, token_probabilities


def test_probabilities_match_transformers(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "qwen2")
    prompt, answer = random_tokens(1, 5, seed=1)[0].tolist(), random_tokens(1, 300, seed=2)[0].tolist()
    items = token_probabilities(load_model(checkpoint), prompt, answer)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(checkpoint).float()(torch.tensor([prompt + answer])).logits
    expected = logits[0, len(prompt) - 1 : -1].softmax(-1)
    assert [item.token for item in items] == answer
    probabilities = torch.tensor([item.probability for item in items])
    torch.testing.assert_close(probabilities, expected[range(300), answer], rtol=1e-4, atol=1e-6)
    values, ids = expected.topk(5)
    for item, row_values, row_ids in zip(items, values.tolist(), ids.tolist(), strict=True):
        assert [token for token, _ in item.alternatives] == row_ids
        assert [value for _, value in item.alternatives] == pytest.approx(row_values, rel=1e-4)
    assert token_probabilities(load_model(checkpoint), prompt, []) == []


class Page(HTMLParser):
    """Texts and tooltips of the colored elements of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tokens: list[tuple[str, str]] = []
        self.tooltip: str | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag != "script"
        self.tooltip = dict(attrs).get("title") if tag == "i" else None

    def handle_data(self, data: str) -> None:
        if self.tooltip is not None:
            self.tokens.append((data, self.tooltip))
            self.tooltip = None


def test_page_shows_text_and_escapes_it() -> None:
    path = assets.model_dir("tunekit/nano")
    assert path is not None
    tokenizer = Tokenizer.open(path)
    text = "<script>alert(1)</script> caf\u00e9"
    items = [TokenProbability(token, 0.5, [(token, 0.5), (1, 0.25)]) for token in tokenizer.encode(text)]
    page = Page(render_probabilities(tokenizer, tokenizer.encode("<b>"), items, "<i>title"))
    shown = [(text, tooltip) for text, tooltip in page.tokens if tooltip]
    assert "".join(text for text, _ in shown) == text
    assert all(tooltip.startswith("50.00% ") and "25.00%" in tooltip for _, tooltip in shown)


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_image_has_every_token_once(kind: str) -> None:
    path = assets.model_dir("tunekit/nano")
    assert path is not None
    tokenizer = Tokenizer.open(path)
    text = "A $long$ answer, <b> caf\u00e9.\n" * 9
    items = [TokenProbability(token, 0.5, []) for token in tokenizer.encode(text)]
    cells = [*place_cells(tokenizer, items)]
    assert "".join(cell[2].strip() for cell in cells).replace("\u21b5", "") == "".join(text.split())
    for line in {cell[0] for cell in cells}:  # cells of a line do not overlap
        ends = [(start, start + len(shown)) for number, start, shown, _ in cells if number == line]
        assert all(end <= start for (_, end), (start, _) in zip(ends, ends[1:], strict=False))
    data = draw_probabilities(tokenizer, items, "title", kind)
    assert data.startswith(b"\x89PNG" if kind == "png" else b"<?xml")
