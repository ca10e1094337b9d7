"""What a person meets who learns from preferences: mistakes, figures, and runs that were stopped."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from tests.recipes.conftest import SHORT, Work
from tests.recipes.test_resume import stop_after
from tunekit.training import reference_model
from tunekit.training.reference_model import RunningMean
from tunekit.training.step_guard import Anomaly, StepGuard

CONFIG = """\
recipe: preference
model: {model}
data: {{kind: preference, source: pairs.jsonl, max_length: 64}}
eval_data: {{kind: preference, source: held.jsonl, max_length: 64}}
adapter: {{kind: lora, rank: 4, dropout: 0.3}}
optimizer: {{kind: adamw, lr: 1e-2}}
max_steps: 5
"""
RUN = ("run", "preference", "preference.yaml")
MARKED = (
    "data={kind: unpaired_preference, source: pairs.jsonl}",
    "eval_data={kind: unpaired_preference, source: held.jsonl}",
)
FIGURES = ("chosen", "rejected", "accuracies", "margins")


def pairs(first: int, count: int) -> str:
    """Sums, of which the wrong ones are rejected."""
    rows = []
    for n in range(first, first + count):
        talk = [{"role": "user", "content": f"What is {n} plus {n * n}?"}]
        told = {name: [{"role": "assistant", "content": f"It is {n + n * n + off}"}] for name, off in SIDES.items()}
        rows.append({"prompt": talk, **told, "completion": told["chosen"], "label": n % 3 > 0})
    return "".join(json.dumps(row) + "\n" for row in rows)


SIDES = {"chosen": 0, "rejected": 7}


@pytest.fixture
def judged(work: Work) -> Work:
    """A folder with `preference.yaml`, pairs and held-out ones, all of which are marks too."""
    Path("pairs.jsonl").write_text(pairs(1, 10))
    Path("held.jsonl").write_text(pairs(100, 3))
    Path("preference.yaml").write_text((CONFIG + SHORT).format(model=work.model))
    return work


@pytest.mark.parametrize(("changes", "told"), [
    (("loss=dpoo",), "unknown kind 'dpoo', did you mean 'dpo'?"),
    (("loss.beta=0",), "loss.beta: must be above 0, not 0.0"),
    (("loss=robust", "loss.label_smoothing=0.5"), "loss.label_smoothing: a share of labels from 0 to below 0.5, "
                                                  "not 0.5"),
    (("loss=[]",), "loss: name at least one term"),
    (("ld_alpha=2",), "ld_alpha: a weight from 0 to 1, not 2.0"),
    (("loss=[dpo,sft]", "ld_alpha=0.5"), "ld_alpha: is for pairs that are compared with a reference, and sft "
                                         "does not do so"),
    (("loss=kto", "ld_alpha=0.5"), "ld_alpha: is for pairs that are compared with a reference, and kto does not do so"),
    (MARKED[1:], "eval_data: these rows are single answers, and those of `data` are pairs"),
    (("adapter=none", "reference=disable_adapter"), "reference: disable_adapter: all weights are trained"),
    (("adapter.modules_to_save=norms", "reference=disable_adapter"), "reference: disable_adapter: some weights "
                                                                     "are trained whole"),
    (("loss=orpo", "reference=copy"), "reference: copy: nothing is compared with a reference by orpo: leave it out"),
    (("loss=[cpo,sft]", "reference=precomputed"), "reference: precomputed: nothing is compared with a reference "
                                                  "by cpo and sft"),
    (("loss=simpo", "adapter=none", "reference=disable_adapter"), "reference: disable_adapter: nothing is "
                                                                  "compared with a reference by simpo"),
    (("loss=kto", "reference=precomputed"), "reference: precomputed: kto asks for other answers in each step"),
    (MARKED, "dpo compares pairs, and these rows are single answers"),
    (("data.kind=chat",), "data.kind: unknown kind 'chat'"),
])  # fmt: skip
def test_mistakes(changes: tuple[str, ...], told: str, judged: Work) -> None:
    outcome = judged.tune(*RUN, *changes)
    assert outcome.code == 2
    assert told in outcome.err and "Traceback" not in outcome.err


@pytest.mark.parametrize("changes", [
    ("loss=[{kind: dpo}, {kind: sft, weight: 0.5}]", "reference=precomputed", "data.packing=true"),
    ("loss=bco", *MARKED),
    ("loss=[kto, aot]", "adapter=none"),
], ids=["rpo, cached", "bco", "kto and aot"])  # fmt: skip
def test_a_stopped_run_goes_on_as_if_it_had_not_been(
    changes: tuple[str, ...], judged: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert judged.tune(*RUN, *changes, "output_dir=whole").code == 0
    stop_after(monkeypatch, 2)
    assert judged.tune(*RUN, *changes, "output_dir=stopped").code == 143
    assert judged.tune(*RUN, *changes, "output_dir=stopped").code == 0
    assert judged.same("stopped", "whole")


def test_figures(judged: Work) -> None:
    """Of every step, and of held-out rows; a config that is written out makes the same run."""
    assert judged.tune(*RUN).code == 0
    lines = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    for line in steps:
        assert {f"rewards/{name}" for name in FIGURES} | {"logps/chosen", "logps/rejected", "entropy"} <= line.keys()
        assert line["rewards/margins"] == pytest.approx(line["rewards/chosen"] - line["rewards/rejected"], abs=1e-5)
    held = [line for line in lines if "eval/loss" in line]
    assert [line["step"] for line in held] == [0, 3, 5]
    assert held[0]["eval/loss"] == pytest.approx(0.6931472, rel=1e-6)
    assert all(f"eval/rewards/{name}" in held[0] for name in FIGURES)
    assert yaml.safe_load(Path("out/config.yaml").read_text())["loss"][0]["kind"] == "dpo"
    assert judged.tune("run", "preference", "out/config.yaml", "output_dir=again").code == 0
    assert judged.same("again", "out")


def test_a_cached_reference_knows_every_epoch(judged: Work) -> None:
    """Of a mix, each of which has other rows."""
    mix = (
        "data={kind: mixture, max_length: 64, datasets: [{dataset: {kind: preference, source: pairs.jsonl}, "
        "max_samples_per_epoch: 4}]}"
    )
    for kept in ("disable_adapter", "precomputed"):
        outcome = judged.tune(*RUN, mix, "eval_data=null", f"reference={kept}", f"output_dir={kept}")
        assert outcome.code == 0, outcome.err
    off, cached = (losses(name) for name in ("disable_adapter", "precomputed"))
    assert cached == pytest.approx(off, abs=1e-6) and len(off) == 5


def test_a_cached_reference_is_of_the_adapter_as_it_is_now(judged: Work) -> None:
    """Training begins with it, so that before the first step all log-ratios are 0."""
    still = ("eval_data=null", "adapter.dropout=0")
    for lr in ("1e-2", "2e-2"):
        assert judged.tune(*RUN, *still, f"optimizer.lr={lr}", "output_dir=start", "--overwrite").code == 0
        on = judged.tune(
            *RUN, *still, "adapter.adapter_path=start/final", "reference=precomputed", "output_dir=on", "--overwrite"
        )
        assert on.code == 0, on.err
        assert losses("on")[0] == pytest.approx(0.6931472, rel=1e-6)


def test_kept_log_probabilities_are_those_of_this_model_and_these_rows(
    judged: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the folder of another run, whatever has changed since; and a run that starts over begins without them."""
    asked, ask = [], reference_model.compute_reference_logps
    monkeypatch.setattr(reference_model, "compute_reference_logps", lambda *how: asked.append(1) or ask(*how))
    shutil.copytree(judged.model, "model")
    files = ("reference.npz", "eval/reference.npz")

    def times(out: str, *changes: str, kept: str | None = None) -> int:
        """How often the reference is asked about all rows, with what another run has kept."""
        for file in ("config.yaml", *files) if kept is not None else ():
            Path(out, file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(kept or "", file), Path(out, file))
        asked.clear()
        done = judged.tune(*RUN, "model=model", "reference=precomputed", "max_steps=1", *changes, f"output_dir={out}")
        assert done.code == 0, done.err
        return len(asked)

    assert times("one") == 2
    assert times("same", "optimizer.lr=1e-3", "global_batch_size=2", kept="one") == 0
    for number, change in enumerate(
        ("ld_alpha=0.5", "adapter.rank=2", "precision.compute_dtype=bf16", "quantization=nf4", "seed=2")
    ):
        assert times(f"other{number}", change, kept="one") == 2, change
    shutil.copy("pairs.jsonl", "before.jsonl")
    Path("pairs.jsonl").write_text(pairs(2, 10))
    assert times("rows", kept="one") == 1
    shutil.copy("before.jsonl", "pairs.jsonl")
    Path("model/model.safetensors").touch()
    assert times("model2", kept="one") == 2
    assert times("model2", "--overwrite") == 2


def test_a_cached_reference_knows_the_rows_that_a_way_back_leads_to(
    judged: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are of epochs that the run would else not begin, and an epoch of this mix has some rows only."""
    mix = (
        "data={kind: mixture, max_length: 64, datasets: [{dataset: {kind: preference, source: pairs.jsonl}, "
        "max_samples_per_epoch: 4}]}"
    )
    judge = StepGuard.judged

    def spiked(watch: StepGuard, step: int, loss: float, norm: float) -> Anomaly | None:
        found = judge(watch, step, loss, norm)
        return watch.bad(step, "a spike", "rollback") if watch.data(step) == 1 else found

    monkeypatch.setattr(StepGuard, "judged", spiked)
    rule = ("step_guard.spike_factor=20", "step_guard.on_spike=rollback", "save_every=9", "max_steps=2")
    for kept in ("disable_adapter", "precomputed"):
        outcome = judged.tune(*RUN, mix, "eval_data=null", *rule, f"reference={kept}", f"output_dir={kept}")
        assert outcome.code == 0 and "back to step 0" in outcome.err, outcome.err
    off, cached = (losses(name) for name in ("disable_adapter", "precomputed"))
    assert cached == pytest.approx(off, abs=1e-6) and len(off) == 2


def losses(out: str) -> list[float]:
    lines = map(json.loads, Path(out, "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def test_a_mean_passes_over_what_is_no_number() -> None:
    shift = RunningMean()
    assert shift.take(torch.tensor([1.0, 3.0])) == 2
    assert shift.take(torch.tensor([torch.nan, 5.0])) == 2
    assert shift.take(torch.tensor([5.0])) == 3


@pytest.mark.parametrize("label", [1, "true"])
def test_a_label_that_is_no_mark(label: object, judged: Work) -> None:
    Path("pairs.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b", "label": label}) + "\n")
    done = judged.tune(*RUN, "loss=kto", "data={source: pairs.jsonl}", "eval_data=null")
    assert done.code == 2 and "pairs.jsonl:1: label: want true or false, this is" in done.err
