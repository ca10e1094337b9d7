"""Whatever ends a run, the same command goes on, and the end is that of an unbroken run to the last bit."""

import random
import signal
import time

import pytest
import yaml

from tunekit.checkpoint.training_state import Checkpointer
from tunekit.loggers.metric_logger import MetricLogger

RUN = ("run", "sft", "sft.yaml")
WAYS = {
    "full": ("max_steps=9", "optimizer={kind: sgd, lr: 0.1, momentum: 0.9}", "save_total_limit=2"),
    "lora": (
        "max_steps=9",
        "adapter={kind: lora, rank: 4, dropout: 0.3, loraplus_lr_ratio: 4}",
        "optimizer={kind: adamw, lr: 1e-2}",
    ),
}
# When to kill: most often at any time of a run, and else a few milliseconds after a folder began to be written.
MOMENTS = [None, None, None, "state/*.partial", "final.partial"] * 4


def timed(work, *words):
    """How long a run takes from beginning to end, in seconds."""
    began = time.monotonic()
    process = work.start(*words)
    process.join()
    assert process.exitcode == 0, work.log
    return time.monotonic() - began


def killed(work, out, words, moment, left, dice):
    """Start a run, kill it; whether that came before its end."""
    process = work.start(*words)
    if moment is None:
        time.sleep(dice.uniform(0, left))
    else:
        while process.is_alive() and not any((work.folder / out).glob(moment)):
            time.sleep(0.0005)
        time.sleep(dice.uniform(0, 0.01))
    process.kill()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL), work.log
    return process.exitcode != 0


def done(work, out):
    """Steps behind the newest state."""
    return max((int(mark.parent.name) for mark in (work.folder / out).glob("state/*/complete")), default=0)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_killed_at_twenty_moments(work, way):
    words = (*RUN, *WAYS[way])
    whole = timed(work, *words)
    least = 0.4 * whole  # of it goes by before the first step and behind the last
    dice = random.Random(way)
    kills, runs = 0, 1
    while kills < len(MOMENTS):
        out = f"out{runs}"
        left = least + (whole - least) * (1 - done(work, out) / 9)
        if killed(work, out, (*words, f"output_dir={out}"), MOMENTS[kills], left, dice):
            kills += 1
        else:
            assert work.same("out", out)
            runs += 1
    timed(work, *words, f"output_dir={out}")
    assert work.same("out", out)


def stop_after(monkeypatch, step):
    """From now on runs are told to stop when they have saved this step."""
    save = Checkpointer.save

    def stopping(state, at):
        save(state, at)
        if at == step:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Checkpointer, "save", stopping)


EARLY = ("max_grad_norm=0", "micro_batch_size=4", "memory.optimizer_in_bwd=true")
MOVERS = {
    "adamw8bit": ("optimizer={kind: adamw8bit, lr: 1e-2}",),
    "muon": ("optimizer={kind: muon, lr: 1e-2}",),
    "adamw early": ("optimizer={kind: adamw, lr: 1e-2}", *EARLY),
    "adamw8bit early": ("optimizer={kind: adamw8bit, lr: 1e-2}", *EARLY),
    "muon early": ("optimizer={kind: muon, lr: 1e-2}", *EARLY),
}


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize(
    "adapter", ["none", "{kind: lora, rank: 4, loraplus_lr_ratio: 4, target_modules: [all-linear, embed_tokens]}"]
)
def test_every_optimizer_goes_on(work, monkeypatch, mover, adapter):
    words = (*RUN, f"adapter={adapter}", *MOVERS[mover])
    assert work.tune(*words).code == 0
    first, *_, last = [line["loss"] for line in work.numbers("out") if "loss" in line]
    assert last < first
    stop_after(monkeypatch, 3)
    assert work.tune(*words, "output_dir=broken").code == 143
    assert work.tune(*words, "output_dir=broken").code == 0
    assert work.same("out", "broken")


def test_weights_move_inside_the_backward_pass_to_the_same_place(work):
    plain = ("optimizer={kind: adamw, lr: 1e-2}", *EARLY[:2])
    assert work.tune(*RUN, *plain).code == 0
    assert work.tune(*RUN, *plain, EARLY[2], "output_dir=early").code == 0
    assert work.same("out", "early")


def test_patience_survives(work, monkeypatch):
    """Two bad validations end the run; the run is stopped between them."""
    bad = (*RUN, "optimizer.lr=0.5", "max_steps=20", "eval_every=1", "early_stopping_patience=2")
    assert work.tune(*bad).code == 0
    ended = work.numbers("out")[-1]["step"]
    assert 2 < ended < 20
    stop_after(monkeypatch, ended - 1)
    assert work.tune(*bad, "output_dir=broken").code == 143
    assert work.tune(*bad, "output_dir=broken").code == 0
    assert work.same("out", "broken")
    assert work.tune(*bad, "output_dir=broken").code == 0, "what has ended by patience does not go on"
    assert work.same("out", "broken")


def test_finished_run_does_nothing_more(work, monkeypatch):
    assert work.tune(*RUN).code == 0
    files = {path: path.stat().st_mtime_ns for path in (work.folder / "out").rglob("*.safetensors")}
    numbers = work.numbers("out")
    monkeypatch.setattr(MetricLogger, "log_step", None)
    again = work.tune(*RUN)
    assert again.code == 0
    assert "nothing is left to do" in again.err
    assert files == {path: path.stat().st_mtime_ns for path in (work.folder / "out").rglob("*.safetensors")}
    assert numbers == work.numbers("out")


def test_fresh_starts_over(work):
    assert work.tune(*RUN, "seed=1").code == 0
    assert work.tune(*RUN, "output_dir=other").code == 0
    assert not work.same("out", "other")
    notes = work.folder / "out" / "notes.txt"
    notes.write_text("mine")
    assert work.tune(*RUN, "--overwrite").code == 0
    assert work.same("out", "other")
    assert notes.read_text() == "mine"


def test_fresh_erases_nothing_before_all_is_read(work):
    assert work.tune(*RUN).code == 0
    files = (path for path in (work.folder / "out").rglob("*") if path.is_file() and path.name != ".lock")
    before = {path: path.read_bytes() for path in files}
    (work.folder / "bad.jsonl").write_text('{"messages": 3}\n')
    refused = work.tune(*RUN, "--overwrite", "data.source=bad.jsonl")
    assert refused.code == 2 and "bad.jsonl" in refused.err
    assert {path: path.read_bytes() for path in before} == before
    assert work.tune(*RUN).code == 0


def test_another_config_is_refused_by_its_key(work, monkeypatch):
    stop_after(monkeypatch, 2)
    assert work.tune(*RUN).code == 143
    for word, key in [
        ("seed=5", "seed: 0 there, 5 now"),
        ("optimizer.lr=0.5", "optimizer.lr"),
        ("max_steps=9", "max_steps"),
    ]:
        refused = work.tune(*RUN, word)
        assert refused.code == 2
        assert key in refused.err
        assert "--overwrite" in refused.err
        assert yaml.safe_load((work.folder / "out/config.yaml").read_text())["seed"] == 0
    assert done(work, "out") == 2


@pytest.mark.parametrize(("words", "way"), [
    ((), "model=out/final and another output_dir="),
    (("adapter=lora", "optimizer.lr=1e-2"), "adapter.adapter_path=out/final and another output_dir="),
    (("init=random",), "model=out/final init=pretrained and another output_dir="),
])  # fmt: skip
def test_more_steps_of_a_finished_run_are_another_run_that_begins_with_it(work, words, way):
    assert work.tune(*RUN, *words).code == 0
    refused = work.tune(*RUN, *words, "max_steps=9")
    assert refused.code == 2 and refused.err.count("\n") == 1
    assert refused.err.startswith(f"error: out has finished (max_steps: 6 there, 9 now): {way}")
    keys = way.removesuffix(" and another output_dir=").split()
    assert work.tune(*RUN, *words, *keys, "max_steps=1", "output_dir=more").code == 0
    before, after = ([x["eval/loss"] for x in work.numbers(out) if "eval/loss" in x] for out in ("out", "more"))
    assert after[0] == pytest.approx(before[-1], rel=1e-4) and before[0] != pytest.approx(before[-1], rel=1e-3)


def test_what_pissa_has_made_is_merged_to_train_on(work):
    words = "adapter=lora", "adapter.init=pissa"
    assert work.tune(*RUN, *words).code == 0
    refused = work.tune(*RUN, *words, "max_steps=9")
    assert f"`tune merge {work.model} out/final OUT`, then model=OUT and another output_dir=" in refused.err
    assert work.tune("merge", str(work.model), "out/final", "merged").code == 0
    assert work.tune(*RUN, *words, "model=merged", "output_dir=more").code == 0


def test_what_does_not_change_the_result_may_change(work, monkeypatch):
    assert work.tune(*RUN, "output_dir=unbroken").code == 0
    stop_after(monkeypatch, 2)
    assert work.tune(*RUN).code == 143
    (work.folder / "out").rename(work.folder / "moved")
    assert work.tune(*RUN, "output_dir=moved", "save_every=100", "save_total_limit=3", "log_every=1").code == 0
    assert work.same("unbroken", "moved")


def test_validation_may_come_and_go_without_a_trace(work):
    """Neither validating nor saving draws a random number or moves a weight."""
    lora = (*RUN, "adapter={kind: lora, dropout: 0.3}")
    assert work.tune(*lora).code == 0
    assert work.tune(*lora, "eval_data=null", "save_every=100", "output_dir=plain").code == 0
    plain, watched = work.numbers("plain"), work.numbers("out")
    assert [line for line in plain if "loss" in line] == [line for line in watched if "loss" in line]
    assert [line["step"] for line in watched if "eval/loss" in line] == [0, 3, 6], "before the first step too"
    assert not [line for line in plain if "eval/loss" in line]
