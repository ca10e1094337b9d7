"""Terminal output: lines fit, no token is lost, and brackets show the same as colors."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunekit import assets
from tunekit.data.check_target import Finding
from tunekit.data.inspect import terminal
from tunekit.data.inspect.examples import ExampleView, TokenSpan
from tunekit.data.inspect.stats import Histogram, make_histogram
from tunekit.data.inspect.terminal import TerminalSize, display_width
from tunekit.data.inspect.token_display import TokenRole
from tunekit.data.tokenizer import Tokenizer

COLOR_CODE = re.compile(r"\x1b\[[\d;]*m")
MODEL_DIR = assets.model_dir("tunekit/nano")
assert MODEL_DIR is not None
NANO = Tokenizer.open(MODEL_DIR)


def make_row(text: str, states: list[int] | None = None) -> ExampleView:
    ids = NANO.encode(text)
    return ExampleView("data", "rows.jsonl:1", (TokenSpan(ids, states or [TokenRole.CONTEXT] * len(ids)),), "", 1)


@given(st.text(max_size=80), st.integers(20, 100), st.booleans(), st.data())
def test_lines_fit_and_show_every_token(text: str, width: int, use_color: bool, data: st.DataObject) -> None:
    ids = NANO.encode(text)
    states = data.draw(st.lists(st.sampled_from([0, 1, 2]), min_size=len(ids), max_size=len(ids)))
    _, *lines = terminal.format_row(make_row(text, states), NANO, TerminalSize(width, use_color))
    uncolored = [COLOR_CODE.sub("", line) for line in lines]
    assert all(display_width(line) <= width for line in uncolored)
    assert use_color or uncolored == lines
    letters = "".join(character for character in text if character.isalnum() and character.isascii())
    assert letters in re.sub(r"U\+[0-9A-F]+|[^A-Za-z0-9]", "", "".join(uncolored)) or max(text) >= "\u2400"


def test_brackets_enclose_targets_and_truncated_tokens() -> None:
    texts = [("<|begin|><|user|>Hi<|turn|><|assistant|>", 0), ("Hello.<|turn|>", 1), ("<|user|>More", 2)]
    ids = [NANO.encode(text) for text, _ in texts]
    states = [state for token_ids, (_, state) in zip(ids, texts, strict=True) for _ in token_ids]
    example = ExampleView(
        "data",
        "rows.jsonl:1",
        (TokenSpan([token for token_ids in ids for token in token_ids], states),),
        "cut: 2 lost",
        1,
    )
    lines = list(terminal.format_row(example, NANO, TerminalSize(120, False)))
    num_targets = len(ids[1])
    assert lines[0].startswith(f"data row 1  rows.jsonl:1  {len(states)} tokens, {num_targets} ")
    assert lines[1:] == ["cut: 2 lost", "<|begin|><|user|>Hi<|turn|><|assistant|>⟦Hello.<|turn|>⟧⟪<|user|>More⟫", ""]
    colored_line = list(terminal.format_row(example, NANO, TerminalSize(120, True)))[2]
    end, cut = f"{terminal.TARGET_SPECIAL}<|turn|>{terminal.RESET}", f"{terminal.DROPPED}<|user|>{terminal.RESET}"
    assert end + cut in colored_line


def test_middle_of_long_rows_is_omitted_and_counted() -> None:
    text = " ".join(f"word{number}" for number in range(300))
    lines = "\n".join(terminal.format_row(make_row(text), NANO, TerminalSize(100, False), full=False))
    (omitted,) = re.findall(r"⋯ ([\d,]+) more ⋯", lines)
    num_pieces = len(terminal.display_tokens(NANO, NANO.encode(text), [0] * len(NANO.encode(text))))
    assert int(omitted.replace(",", "")) == num_pieces - 2 * terminal.EDGE_TOKENS
    assert "word0" in lines and "word299" in lines and "word150" not in lines
    assert "more ⋯" not in "".join(terminal.format_row(make_row(text), NANO, TerminalSize(100, False)))


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=50))
def test_histogram_counts_every_value_once(values: list[int]) -> None:
    result = make_histogram(np.array(values))
    for low, high, count in zip(result.edges, result.edges[1:], result.counts, strict=False):
        assert count == sum(low <= value < high for value in values)
    assert sum(result.counts) == len(values) and len(result.counts) <= 16


@pytest.mark.parametrize("width", [20, 40, 76, 200])
def test_bars_fit(width: int) -> None:
    bars = terminal.format_histogram("tokens", Histogram((0, 5, 10, 15), (0, 1, 9_999)), width)
    assert bars[0] == "tokens" and bars[1].split() == ["0-4", "0"]
    assert bars[3].count("█") == max(8, min(width - 5 - 5 - 2, 40)) and bars[2].strip().startswith("5-9 ▏")


def test_findings_are_wrapped_and_sorted_by_severity() -> None:
    findings = [Finding("wrong", "a", "data", "this is wrong " * 9, "fix it"), Finding("note", "b", "data", "hm", "no")]
    lines = list(terminal.format_findings(findings, TerminalSize(40, False)))
    assert lines[0] == "wrong" and lines[-2] == "note" and "hm" in lines[-1]
    assert all(len(line) <= 40 for line in lines)
    assert len(list(terminal.format_findings([], TerminalSize(40, False)))) == 1
