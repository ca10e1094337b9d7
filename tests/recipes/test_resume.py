"""A run that ended for any reason is resumed by the same command, with bit-identical results."""

import random
import re
import shutil
import signal
import time

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.helpers.recipe_runs import stop_after
from tunekit.checkpoint.training_state import Checkpointer
from tunekit.loggers.metric_logger import MetricLogger

RUN = ("run", "sft", "sft.yaml")
METHODS = {
    "full": ("max_steps=9", "optimizer={kind: sgd, lr: 0.1, momentum: 0.9}", "save_total_limit=2", "save_every=1"),
    "lora": (
        "max_steps=9",
        "save_every=1",
        "adapter={kind: lora, rank: 4, dropout: 0.3, loraplus_lr_ratio: 4}",
        "optimizer={kind: adamw, lr: 1e-2}",
    ),
}
# When to kill: at any time of a run, or a few milliseconds after a directory was created.
MOMENTS = [None, None, None, "state/*.partial", "final.partial"]
NUM_KILLS = {"full": 10, "lora": 5}


def run_and_time(workspace, *args):
    """Duration of a run in seconds."""
    start = time.monotonic()
    process = workspace.start(*args)
    process.join()
    assert process.exitcode == 0, workspace.log
    return time.monotonic() - start


def start_and_kill(workspace, out, args, moment, seconds, rng):
    """Start a run and kill it. False if it had already ended."""
    process = workspace.start(*args)
    if moment is None:
        time.sleep(rng.uniform(0, seconds))
    else:
        while process.is_alive() and not any((workspace.folder / out).glob(moment)):
            time.sleep(0.0005)
        time.sleep(rng.uniform(0, 0.01))
    process.kill()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL), workspace.log
    return process.exitcode != 0


def last_saved_step(workspace, out):
    """Step of the newest state; 0 if there is none."""
    return max((int(mark.parent.name) for mark in (workspace.folder / out).glob("state/*/complete")), default=0)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_sigkill_at_any_moment_does_not_change_the_result(workspace, method):
    args = (*RUN, *METHODS[method])
    run_seconds = run_and_time(workspace, *args)
    startup_seconds = 0.4 * run_seconds  # this part of a run is before the first and after the last step
    rng = random.Random(method)
    kills, runs = 0, 1
    while kills < NUM_KILLS[method]:
        out = f"out{runs}"
        seconds = startup_seconds + (run_seconds - startup_seconds) * (1 - last_saved_step(workspace, out) / 9)
        if start_and_kill(workspace, out, (*args, f"output_dir={out}"), MOMENTS[kills % len(MOMENTS)], seconds, rng):
            kills += 1
        else:
            assert workspace.is_same_run("out", out)
            runs += 1
    run_and_time(workspace, *args, f"output_dir={out}")
    assert workspace.is_same_run("out", out)


IN_BACKWARD = ("max_grad_norm=0", "micro_batch_size=4", "memory.optimizer_in_bwd=true")
OPTIMIZERS = {
    "adamw8bit": ("optimizer={kind: adamw8bit, lr: 1e-2}",),
    "muon": ("optimizer={kind: muon, lr: 1e-2}",),
    "adamw early": ("optimizer={kind: adamw, lr: 1e-2}", *IN_BACKWARD),
    "adamw8bit early": ("optimizer={kind: adamw8bit, lr: 1e-2}", *IN_BACKWARD),
    "muon early": ("optimizer={kind: muon, lr: 1e-2}", *IN_BACKWARD),
}


LORA = "{kind: lora, rank: 4, loraplus_lr_ratio: 4, target_modules: [all-linear, embed_tokens]}"


@pytest.mark.parametrize(
    ("adapter", "optimizer"),
    [*(("none", name) for name in OPTIMIZERS), (LORA, "adamw8bit"), (LORA, "muon"), (LORA, "adamw early")],
)
def test_stopped_run_resumes_bit_exactly_with_each_optimizer(workspace, monkeypatch, optimizer, adapter):
    args = (*RUN, f"adapter={adapter}", *OPTIMIZERS[optimizer])
    assert workspace.run_tune(*args).code == 0
    first, *_, last = [line["loss"] for line in workspace.deterministic_metrics("out") if "loss" in line]
    assert last < first
    stop_after(monkeypatch, 3)
    assert workspace.run_tune(*args, "output_dir=broken").code == 143
    assert workspace.run_tune(*args, "output_dir=broken").code == 0
    assert workspace.is_same_run("out", "broken")


def test_frozen_weights_do_not_change_when_a_run_resumes(workspace, monkeypatch):
    args = (*RUN, "adapter={kind: none, trainable_modules: [attn, norms], frozen_modules: [q_proj]}")
    args += ("optimizer={kind: adamw, lr: 1e-2, lr_pattern: {norms: 1e-3, v_proj: 2e-2}}", "neftune_noise_alpha=5")
    assert workspace.run_tune(*args).code == 0
    stop_after(monkeypatch, 3)
    assert workspace.run_tune(*args, "output_dir=broken").code == 143
    assert workspace.run_tune(*args, "output_dir=broken").code == 0
    assert workspace.is_same_run("out", "broken")
    base = load_file(workspace.model / "model.safetensors")
    changed = {name for name, tensor in workspace.tensors("out").items() if not torch.equal(tensor, base[name])}
    assert changed == {name for name in base if re.search(r"norm|[kvo]_proj", name)}


def test_optimizer_in_bwd_gives_the_same_result(workspace):
    args = ("optimizer={kind: adamw, lr: 1e-2}", *IN_BACKWARD[:2])
    assert workspace.run_tune(*RUN, *args).code == 0
    assert workspace.run_tune(*RUN, *args, IN_BACKWARD[2], "output_dir=early").code == 0
    assert workspace.is_same_run("out", "early")


def test_patience_is_restored(workspace, monkeypatch):
    """The run is stopped between the two evaluations without improvement that end it."""
    args = (*RUN, "optimizer.lr=0.5", "max_steps=20", "eval_every=1", "early_stopping_patience=2")
    assert workspace.run_tune(*args).code == 0
    last_step = max(line["step"] for line in workspace.deterministic_metrics("out"))
    assert 2 < last_step < 20
    stop_after(monkeypatch, last_step - 1)
    assert workspace.run_tune(*args, "output_dir=broken").code == 143
    assert workspace.run_tune(*args, "output_dir=broken").code == 0
    assert workspace.is_same_run("out", "broken")
    assert workspace.run_tune(*args, "output_dir=broken").code == 0, "a run that was stopped early is finished"
    assert workspace.is_same_run("out", "broken")


def test_finished_run_does_nothing(workspace, monkeypatch):
    assert workspace.run_tune(*RUN).code == 0
    files = {path: path.stat().st_mtime_ns for path in (workspace.folder / "out").rglob("*.safetensors")}
    numbers = workspace.deterministic_metrics("out")
    monkeypatch.setattr(MetricLogger, "log_step", None)
    second = workspace.run_tune(*RUN)
    assert second.code == 0
    assert "run is complete" in second.err
    assert files == {path: path.stat().st_mtime_ns for path in (workspace.folder / "out").rglob("*.safetensors")}
    assert numbers == workspace.deterministic_metrics("out")


def test_overwrite_starts_over(workspace):
    assert workspace.run_tune(*RUN, "seed=1").code == 0
    assert workspace.run_tune(*RUN, "output_dir=other").code == 0
    assert not workspace.is_same_run("out", "other")
    notes = workspace.folder / "out" / "notes.txt"
    notes.write_text("mine")
    assert workspace.run_tune(*RUN, "--overwrite").code == 0
    assert workspace.is_same_run("out", "other")
    assert notes.read_text() == "mine"


def test_overwrite_erases_nothing_before_inputs_are_checked(workspace):
    assert workspace.run_tune(*RUN).code == 0
    files = (path for path in (workspace.folder / "out").rglob("*") if path.is_file() and path.name != ".lock")
    before = {path: path.read_bytes() for path in files}
    (workspace.folder / "bad.jsonl").write_text('{"messages": 3}\n')
    refused = workspace.run_tune(*RUN, "--overwrite", "data.source=bad.jsonl")
    assert refused.code == 2 and "bad.jsonl" in refused.err
    assert {path: path.read_bytes() for path in before} == before
    assert workspace.run_tune(*RUN).code == 0


def test_different_config_is_refused_with_the_key(workspace, monkeypatch):
    stop_after(monkeypatch, 2)
    assert workspace.run_tune(*RUN).code == 143
    for override, key in [
        ("seed=5", "seed: 0"),
        ("optimizer.lr=0.5", "optimizer.lr"),
        ("max_steps=9", "max_steps"),
    ]:
        refused = workspace.run_tune(*RUN, override)
        assert refused.code == 2
        assert key in refused.err
        assert "--overwrite" in refused.err
        assert yaml.safe_load((workspace.folder / "out/config.yaml").read_text())["seed"] == 0
    assert last_saved_step(workspace, "out") == 2


@pytest.mark.parametrize(("args", "hint"), [
    ((), "model=out/final and another output_dir"),
    (("adapter=lora", "optimizer.lr=1e-2"), "adapter.adapter_path=out/final and another output_dir"),
    (("init=random",), "model=out/final init=pretrained and another output_dir"),
])  # fmt: skip
def test_more_steps_of_a_finished_run_require_a_new_run(workspace, args, hint):
    assert workspace.run_tune(*RUN, *args).code == 0
    refused = workspace.run_tune(*RUN, *args, "max_steps=9")
    assert refused.code == 2 and refused.err.count("\n") == 1
    assert refused.err.startswith("error: out") and hint in refused.err
    keys = hint.removesuffix(" and another output_dir").split()
    assert workspace.run_tune(*RUN, *args, *keys, "max_steps=1", "output_dir=more").code == 0
    before, after = (
        [x["eval/loss"] for x in workspace.deterministic_metrics(out) if "eval/loss" in x] for out in ("out", "more")
    )
    assert after[0] == pytest.approx(before[-1], rel=1e-4) and before[0] != pytest.approx(before[-1], rel=1e-3)


def test_finished_pissa_run_must_be_merged_first(workspace):
    args = "adapter=lora", "adapter.init=pissa"
    assert workspace.run_tune(*RUN, *args).code == 0
    refused = workspace.run_tune(*RUN, *args, "max_steps=9")
    assert f"`tune merge {workspace.model} out/final OUT`, then model=OUT and another output_dir" in refused.err
    assert workspace.run_tune("merge", str(workspace.model), "out/final", "merged").code == 0
    assert workspace.run_tune(*RUN, *args, "model=merged", "output_dir=more").code == 0


def test_options_without_effect_on_the_result_may_change(workspace, monkeypatch):
    """Weights stay bit-identical, except for the rounding of other micro-batches."""
    args = (*RUN, *IN_BACKWARD[:2])
    assert workspace.run_tune(*args, "output_dir=unbroken").code == 0
    stop_after(monkeypatch, 2)
    assert workspace.run_tune(*args).code == 143
    shutil.copytree(workspace.folder / "out", workspace.folder / "moved")
    exact = ("save_every=2", "save_total_limit=3", "log_every=1", "data.num_proc=0", "data.source=./rows.jsonl")
    exact += ("memory={activation_checkpointing: full, optimizer_in_bwd: true}",)
    assert workspace.run_tune(*args, "output_dir=moved", *exact).code == 0
    assert workspace.is_same_run("unbroken", "moved")
    resumed = workspace.run_tune(*args, "micro_batch_size=1", "eval_every=1")
    assert resumed.code == 0 and "resuming from step 2" in resumed.err
    torch.testing.assert_close(workspace.tensors("out"), workspace.tensors("unbroken"))


def test_evaluation_does_not_change_training(workspace):
    """Neither evaluating nor saving uses random numbers or changes weights."""
    lora = (*RUN, "adapter={kind: lora, dropout: 0.3}")
    assert workspace.run_tune(*lora, "save_every=1").code == 0
    assert workspace.run_tune(*lora, "eval_data=null", "output_dir=plain").code == 0
    without_eval, with_eval = workspace.deterministic_metrics("plain"), workspace.deterministic_metrics("out")
    assert [line for line in without_eval if "loss" in line] == [line for line in with_eval if "loss" in line]
    assert [line["step"] for line in with_eval if "eval/loss" in line] == [0, 3, 6], "before the first step too"
    assert not [line for line in without_eval if "eval/loss" in line]


@pytest.mark.parametrize("deleted", [".", "metrics.jsonl", "state"])
def test_run_continues_after_its_files_were_deleted(workspace, monkeypatch, deleted):
    """The directory is written again, and the next start finds a complete run."""
    save = Checkpointer.save

    def deleting(state, step):
        save(state, step)
        if step == 3:
            path = workspace.folder / "out" / deleted
            path.unlink() if path.is_file() else shutil.rmtree(path)

    monkeypatch.setattr(Checkpointer, "save", deleting)
    assert workspace.run_tune(*RUN, "output_dir=intact").code == 0
    done = workspace.run_tune(*RUN, "save_every=3")
    assert done.code == 0 and ("was deleted during the run" in done.err) == (deleted == "."), done.err
    assert workspace.is_same_run("out", "intact")
    assert "run is complete" in workspace.run_tune(*RUN).err


def test_evaluation_loss_does_not_depend_on_the_training_loss(workspace):
    losses = []
    for number, loss in enumerate(("loss.z_loss=0", "loss.label_smoothing=0.5")):
        out = f"out{number}"
        assert workspace.run_tune(*RUN, loss, f"output_dir={out}", "max_steps=1").code == 0
        losses.append(workspace.deterministic_metrics(out))
    plain, smoothed = losses
    assert plain[0] == smoothed[0] and "eval/loss" in plain[0]
    assert plain[1]["loss"] < smoothed[1]["loss"]
