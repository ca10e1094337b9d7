"""Mixes and streams through a config: a run that was stopped goes on with the rows that it would have seen."""

import json
import threading

import pytest

from tests.recipes.test_resume import stop_after
from tunekit.data.dataloader import stream_blocks

RUN = ("run", "sft", "sft.yaml")
ONE, OTHER = "source: rows.jsonl, split: 'train[:7]'", "kind: chat, source: rows.jsonl, split: 'train[7:]'"
PARTS = f"[{{rows: {{{ONE}}}, weight: 2}}, {{rows: {{{OTHER}}}, weight: 1}}]"
STREAMS = PARTS.replace(ONE, f"{ONE}, stream: true")
WAYS = {
    "mix": f"data={{kind: mix, length: 64, parts: {PARTS}}}",
    "packed mix": f"data={{kind: mix, length: 64, pack: true, parts: {PARTS}}}",
    "stream": "data={kind: chat, source: rows.jsonl, length: 64, stream: true, workers: 0}",
    "packed stream": "data={kind: chat, source: rows.jsonl, length: 64, pack: true, stream: true, workers: 0}",
    "mix of streams": f"data={{kind: mix, length: 64, parts: {STREAMS}}}",
}
FAST = ("packed mix", "mix of streams")


@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.slow] * (way not in FAST)) for way in WAYS])
def test_it_goes_on_where_it_was(way: str, work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_blocks, "DOCUMENTS", 8)
    words = (*RUN, WAYS[way])
    whole = work.tune(*words)
    assert whole.code == 0, whole.err
    assert ("documents together are what each is alone" in whole.err) == ("packed" in way)
    assert ("a stream, whose first block has" in whole.err) == ("stream" in way)
    stop_after(monkeypatch, 3)
    assert work.tune(*words, "out=broken").code == 143
    again = work.tune(*words, "out=broken")
    assert again.code == 0, again.err
    assert "goes on from step 3 of 6" in again.err
    assert "together are what each is alone" not in again.err, "it was asked before the first step"
    assert work.same("out", "broken")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tunekit")]


def test_what_has_no_end_is_told_with_the_config(work) -> None:
    endless = work.tune(*RUN, WAYS["stream"], "steps=null")
    assert endless.code == 2
    assert "nobody knows how many steps a stream has" in endless.err
    held = work.tune(*RUN, "validation={kind: chat, source: held.jsonl, stream: true}")
    assert held.code == 2
    assert "it cannot be a stream; `limit` takes the first rows" in held.err
    halves = work.tune(*RUN, "data={kind: mix, parts: [{rows: {source: a}, weight: 1}, {rows: {source: b}}]}")
    assert halves.code == 2
    assert "data.parts.1: has no weight, but others have" in halves.err


@pytest.mark.parametrize(("words", "told"), [((), "17 rows, 7 bad"), (("data.bad_rows=skip",), "17 rows, 7 skipped")])
def test_bad_rows_are_skipped_only_where_they_are(work, words: tuple[str, ...], told: str) -> None:
    rows = (work.folder / "rows.jsonl").read_text().splitlines()[:10]
    (work.folder / "rows.jsonl").write_text("\n".join([*rows, *['{"messages": []}'] * 7]))
    found = work.tune("data", "sft.yaml", "--plain", "--rows", "0", *words)
    assert found.code == 2
    assert f"{told}\n" in found.out and ("skipped" in found.out) == bool(words)
    assert found.out.count("  bad: rows.jsonl:") == 5 and "\n  and 2 more bad rows\n" in found.out
    (work.folder / "rows.jsonl").write_text("\n".join([*rows, '{"messages": []}']))
    found = work.tune("data", "sft.yaml", "--plain", "--rows", "0", *words)
    assert "data: 1 of 11 rows is bad (9.1%" in found.out and "more bad" not in found.out


def test_rows_for_another_recipe_name_it(work) -> None:
    row = json.dumps({"prompt": "1 + 1 = ", "chosen": "2", "rejected": "3"})
    (work.folder / "rows.jsonl").write_text(f"{row}\n" * 12)
    found = work.tune("data", "sft.yaml", "data={source: rows.jsonl}")
    assert found.code == 2
    assert "nothing is left to learn from: 12 rows, 12 bad; the first is rows.jsonl:1: " in found.err
    assert "or take the recipe `preference`, which learns from answers that are compared" in found.err


def test_rows_that_are_dropped_are_told_before_a_run(work) -> None:
    words = ("sft.yaml", "data.too_long=drop", "data.length=20", "--plain", "--rows", "0")
    found = work.tune("data", *words)
    assert found.code == 0 and "are longer than 20 tokens, and dropped" in found.out, found.out
