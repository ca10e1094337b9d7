"""What a terminal shows: no line too long, no token lost, and brackets that say the same as colours."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunekit import assets
from tunekit.data.inspect import terminal
from tunekit.data.inspect.examples import ExampleView, TokenSpan
from tunekit.data.inspect.stats import Histogram, histogram
from tunekit.data.inspect.terminal import TerminalSize, columns
from tunekit.data.inspect.token_display import TokenRole
from tunekit.data.row_checks import Finding
from tunekit.data.tokenizer import Tokenizer

COLOUR = re.compile(r"\x1b\[[\d;]*m")
FOLDER = assets.model_dir("tunekit/nano")
assert FOLDER is not None
NANO = Tokenizer.open(FOLDER)


def row(text: str, states: list[int] | None = None) -> ExampleView:
    ids = NANO.encode(text)
    return ExampleView("data", "rows.jsonl:1", (TokenSpan(ids, states or [TokenRole.CONTEXT] * len(ids)),), "", 1)


@given(st.text(max_size=80), st.integers(20, 100), st.booleans(), st.data())
def test_lines_fit_and_hold_every_token(text: str, width: int, coloured: bool, data: st.DataObject) -> None:
    ids = NANO.encode(text)
    states = data.draw(st.lists(st.sampled_from([0, 1, 2]), min_size=len(ids), max_size=len(ids)))
    _, *lines = terminal.format_row(row(text, states), NANO, TerminalSize(width, coloured))
    bare = [COLOUR.sub("", line) for line in lines]
    assert all(columns(line) <= width for line in bare)
    assert coloured or bare == lines
    letters = "".join(character for character in text if character.isalnum() and character.isascii())
    assert letters in re.sub(r"U\+[0-9A-F]+|[^A-Za-z0-9]", "", "".join(bare)) or max(text) >= "\u2400"


def test_brackets_stand_around_what_is_learnt_and_what_is_cut() -> None:
    parts = [("<|begin|><|user|>Hi<|turn|><|assistant|>", 0), ("Hello.<|turn|>", 1), ("<|user|>More", 2)]
    ids = [NANO.encode(text) for text, _ in parts]
    states = [state for part, (_, state) in zip(ids, parts, strict=True) for _ in part]
    shown = ExampleView(
        "data", "rows.jsonl:1", (TokenSpan([one for part in ids for one in part], states),), "cut: 2 lost", 1
    )
    lines = list(terminal.format_row(shown, NANO, TerminalSize(120, False)))
    learnt = len(ids[1])
    assert lines == [
        f"data row 1  rows.jsonl:1  {len(states)} tokens, {learnt} learnt",
        "cut: 2 lost",
        "<|begin|><|user|>Hi<|turn|><|assistant|>⟦Hello.<|turn|>⟧⟪<|user|>More⟫",
        "",
    ]
    coloured = list(terminal.format_row(shown, NANO, TerminalSize(120, True)))[2]
    assert f"{terminal.END}<|turn|>{terminal.RESET}{terminal.CUT}<|user|>{terminal.RESET}" in coloured


def test_the_middle_of_what_is_long_is_left_out_and_counted() -> None:
    text = " ".join(f"word{number}" for number in range(300))
    lines = "\n".join(terminal.format_row(row(text), NANO, TerminalSize(100, False), whole=False))
    (left,) = re.findall(r"⋯ ([\d,]+) more ⋯", lines)
    pieces = len(terminal.display_tokens(NANO, NANO.encode(text), [0] * len(NANO.encode(text))))
    assert int(left.replace(",", "")) == pieces - 2 * terminal.NEAR
    assert "word0" in lines and "word299" in lines and "word150" not in lines
    assert "more ⋯" not in "".join(terminal.format_row(row(text), NANO, TerminalSize(100, False)))


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=50))
def test_a_histogram_counts_every_value_once(values: list[int]) -> None:
    found = histogram(np.array(values))
    for low, behind, count in zip(found.edges, found.edges[1:], found.counts, strict=False):
        assert count == sum(low <= value < behind for value in values)
    assert sum(found.counts) == len(values) and len(found.counts) <= 16


@pytest.mark.parametrize("width", [20, 40, 76, 200])
def test_bars_fit(width: int) -> None:
    bars = terminal.histogram("tokens", Histogram((0, 5, 10, 15), (0, 1, 9_999)), width)
    assert bars[0] == "tokens" and bars[1].split() == ["0-4", "0"]
    assert bars[3].count("█") == max(8, min(width - 5 - 5 - 2, 40)) and bars[2].strip().startswith("5-9 ▏")


def test_findings_are_wrapped_and_the_worst_stands_first() -> None:
    found = [Finding("wrong", "a", "data", "this is wrong " * 9, "mend it"), Finding("note", "b", "data", "hm", "no")]
    lines = list(terminal.format_findings(found, TerminalSize(40, False)))
    assert lines[0] == "wrong" and lines[-2:] == ["note", "  data: hm; no"]
    assert all(len(line) <= 40 for line in lines)
    assert list(terminal.format_findings([], TerminalSize(40, False))) == ["nothing wrong was found"]
