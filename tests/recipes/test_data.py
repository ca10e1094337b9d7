"""Mixes and streams through a config: a run that was stopped goes on with the rows that it would have seen."""

import json
import threading

import pytest

from tests.recipes.test_resume import stop_after
from tunekit.data.dataloader import stream_blocks

RUN = ("run", "sft", "sft.yaml")
ONE, OTHER = "source: rows.jsonl, split: 'train[:7]'", "kind: chat, source: rows.jsonl, split: 'train[7:]'"
PARTS = f"[{{dataset: {{{ONE}}}, weight: 2}}, {{dataset: {{{OTHER}}}, weight: 1}}]"
STREAMS = PARTS.replace(ONE, f"{ONE}, streaming: true")
WAYS = {
    "mix": f"data={{kind: mixture, max_length: 64, datasets: {PARTS}}}",
    "packed mix": f"data={{kind: mixture, max_length: 64, packing: true, datasets: {PARTS}}}",
    "stream": "data={kind: chat, source: rows.jsonl, max_length: 64, streaming: true, num_proc: 0}",
    "packed stream": "data={kind: chat, source: rows.jsonl, max_length: 64, packing: true, streaming: true, "
    "num_proc: 0}",
    "mix of streams": f"data={{kind: mixture, max_length: 64, datasets: {STREAMS}}}",
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
    assert work.tune(*words, "output_dir=broken").code == 143
    again = work.tune(*words, "output_dir=broken")
    assert again.code == 0, again.err
    assert "goes on from step 3 of 6" in again.err
    assert "together are what each is alone" not in again.err, "it was asked before the first step"
    assert work.same("out", "broken")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tunekit")]


def test_what_has_no_end_is_told_with_the_config(work) -> None:
    endless = work.tune(*RUN, WAYS["stream"], "max_steps=null")
    assert endless.code == 2
    assert "nobody knows how many steps a stream has" in endless.err
    held = work.tune(*RUN, "eval_data={kind: chat, source: held.jsonl, streaming: true}")
    assert held.code == 2
    assert "it cannot be a stream; `max_samples` takes the first rows" in held.err
    halves = work.tune(
        *RUN, "data={kind: mixture, datasets: [{dataset: {source: a}, weight: 1}, {dataset: {source: b}}]}"
    )
    assert halves.code == 2
    assert "data.datasets.1: has no weight, but others have" in halves.err


@pytest.mark.parametrize(("words", "told"), [((), "17 rows, 7 bad"), (("data.on_bad_row=skip",), "17 rows, 7 skipped")])
def test_bad_rows_are_skipped_only_where_they_are(work, words: tuple[str, ...], told: str) -> None:
    rows = (work.folder / "rows.jsonl").read_text().splitlines()[:10]
    (work.folder / "rows.jsonl").write_text("\n".join([*rows, *['{"messages": []}'] * 7]))
    found = work.tune("data", "sft.yaml", "--no-color", "--num-rows", "0", *words)
    assert found.code == 2
    assert f"{told}\n" in found.out and ("skipped" in found.out) == bool(words)
    assert found.out.count("  bad: rows.jsonl:") == 5 and "\n  and 2 more bad rows\n" in found.out
    (work.folder / "rows.jsonl").write_text("\n".join([*rows, '{"messages": []}']))
    found = work.tune("data", "sft.yaml", "--no-color", "--num-rows", "0", *words)
    assert "data: 1 of 11 rows is bad (9.1%" in found.out and "more bad" not in found.out


def test_rows_for_another_recipe_name_it(work) -> None:
    row = json.dumps({"prompt": "1 + 1 = ", "chosen": "2", "rejected": "3"})
    (work.folder / "rows.jsonl").write_text(f"{row}\n" * 12)
    found = work.tune("data", "sft.yaml", "data={source: rows.jsonl}")
    assert found.code == 2
    assert "nothing is left to learn from: 12 rows, 12 bad; the first is rows.jsonl:1: " in found.err
    assert "or take the recipe `preference`, which learns from answers that are compared" in found.err


def test_rows_that_are_dropped_are_told_before_a_run(work) -> None:
    words = ("sft.yaml", "data.excess_length_strategy=drop", "data.max_length=20", "--no-color", "--num-rows", "0")
    found = work.tune("data", *words)
    assert found.code == 0 and "are longer than 20 tokens, and dropped" in found.out, found.out
