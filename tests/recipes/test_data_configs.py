"""Mixtures and streams in configs. A stopped run resumes with the rows that it would have seen."""

import json
import threading

import pytest

from tests.recipes.test_resume import stop_after
from tunekit.data.dataloader import stream_blocks

RUN = ("run", "sft", "sft.yaml")
FIRST_SOURCE, SECOND_SOURCE = (
    "source: rows.jsonl, split: 'train[:7]'",
    "kind: chat, source: rows.jsonl, split: 'train[7:]'",
)
MEMBERS = f"[{{dataset: {{{FIRST_SOURCE}}}, weight: 2}}, {{dataset: {{{SECOND_SOURCE}}}, weight: 1}}]"
STREAMING_MEMBERS = MEMBERS.replace(FIRST_SOURCE, f"{FIRST_SOURCE}, streaming: true")
DATASETS = {
    "mix": f"data={{kind: mixture, max_length: 64, datasets: {MEMBERS}}}",
    "packed mix": f"data={{kind: mixture, max_length: 64, packing: true, datasets: {MEMBERS}}}",
    "stream": "data={kind: chat, source: rows.jsonl, max_length: 64, streaming: true, num_proc: 0}",
    "packed stream": "data={kind: chat, source: rows.jsonl, max_length: 64, packing: true, streaming: true, "
    "num_proc: 0}",
    "mix of streams": f"data={{kind: mixture, max_length: 64, datasets: {STREAMING_MEMBERS}}}",
}
FAST = ("packed mix", "mix of streams")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in DATASETS]
)
def test_stopped_run_resumes_bit_exactly(name: str, workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_blocks, "ROUND_DOCUMENTS", 8)
    threads_before = threading.enumerate()  # such as those of hanging tools in other tests
    args = (*RUN, DATASETS[name])
    unbroken = workspace.run_tune(*args)
    assert unbroken.code == 0, unbroken.err
    assert ("packed documents differ by" in unbroken.err) == ("packed" in name)
    assert ("a stream, whose first block has" in unbroken.err) == ("stream" in name)
    stop_after(monkeypatch, 3)
    assert workspace.run_tune(*args, "output_dir=broken").code == 143
    resumed = workspace.run_tune(*args, "output_dir=broken")
    assert resumed.code == 0, resumed.err
    assert "step 3 of 6" in resumed.err
    assert "packed documents differ by" not in resumed.err, "packing is checked only before the first step"
    assert workspace.is_same_run("out", "broken")
    new_threads = [thread for thread in threading.enumerate() if thread not in threads_before]
    assert not [thread for thread in new_threads if thread.name.startswith("tunekit")]


def test_unbounded_data_is_a_config_error(workspace) -> None:
    without_steps = workspace.run_tune(*RUN, DATASETS["stream"], "max_steps=null")
    assert without_steps.code == 2
    assert "max_steps" in without_steps.err
    streaming_eval = workspace.run_tune(*RUN, "eval_data={kind: chat, source: held.jsonl, streaming: true}")
    assert streaming_eval.code == 2
    assert "eval_data" in streaming_eval.err and "max_samples" in streaming_eval.err
    partial_weights = workspace.run_tune(
        *RUN, "data={kind: mixture, datasets: [{dataset: {source: a}, weight: 1}, {dataset: {source: b}}]}"
    )
    assert partial_weights.code == 2
    assert "data.datasets.1: " in partial_weights.err


@pytest.mark.parametrize(
    ("args", "expected"), [((), "17 rows, 7 bad"), (("data.on_bad_row=skip",), "17 rows, 7 skipped")]
)
def test_bad_rows_are_counted_and_listed(workspace, args: tuple[str, ...], expected: str) -> None:
    rows = (workspace.folder / "rows.jsonl").read_text().splitlines()[:10]
    (workspace.folder / "rows.jsonl").write_text("\n".join([*rows, *['{"messages": []}'] * 7]))
    result = workspace.run_tune("data", "sft.yaml", "--no-color", "--num-rows", "0", *args)
    assert result.code == 2
    assert f"{expected}\n" in result.out and ("skipped" in result.out) == bool(args)
    assert result.out.count("  bad: rows.jsonl:") == 5 and "\n  and 2 more bad rows\n" in result.out
    (workspace.folder / "rows.jsonl").write_text("\n".join([*rows, '{"messages": []}']))
    result = workspace.run_tune("data", "sft.yaml", "--no-color", "--num-rows", "0", *args)
    assert "data: 1 of 11 rows is bad (9.1%" in result.out and "more bad" not in result.out


def test_rows_of_another_recipe_suggest_it(workspace) -> None:
    row = json.dumps({"prompt": "1 + 1 = ", "chosen": "2", "rejected": "3"})
    (workspace.folder / "rows.jsonl").write_text(f"{row}\n" * 12)
    result = workspace.run_tune("data", "sft.yaml", "data={source: rows.jsonl}")
    assert result.code == 2
    assert "12 rows, 12 bad; first: rows.jsonl:1: " in result.err
    assert "use the recipe `preference`" in result.err


def test_dropped_rows_are_reported_before_a_run(workspace) -> None:
    args = ("sft.yaml", "data.excess_length_strategy=drop", "data.max_length=20", "--no-color", "--num-rows", "0")
    result = workspace.run_tune("data", *args)
    assert result.code == 0 and "are longer than 20 tokens and dropped" in result.out, result.out
