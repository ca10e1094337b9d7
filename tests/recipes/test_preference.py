"""Preference runs: config errors, metrics and resuming."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from tests.helpers.recipe_runs import SHARED_CONFIG, Workspace
from tests.recipes.test_resume import stop_after
from tunekit.losses.preference_objective import RunningMean
from tunekit.training import reference_model
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
UNPAIRED = (
    "data={kind: unpaired_preference, source: pairs.jsonl}",
    "eval_data={kind: unpaired_preference, source: held.jsonl}",
)
REWARD_METRICS = ("chosen", "rejected", "accuracies", "margins")


def make_pairs(start: int, count: int) -> str:
    """Additions, with wrong results as rejected answers."""
    rows = []
    for n in range(start, start + count):
        prompt = [{"role": "user", "content": f"What is {n} plus {n * n}?"}]
        answers = {
            name: [{"role": "assistant", "content": f"It is {n + n * n + error}"}] for name, error in SIDES.items()
        }
        rows.append({"prompt": prompt, **answers, "completion": answers["chosen"], "label": n % 3 > 0})
    return "".join(json.dumps(row) + "\n" for row in rows)


SIDES = {"chosen": 0, "rejected": 7}


@pytest.fixture
def preference_workspace(workspace: Workspace) -> Workspace:
    """Workspace with `preference.yaml`, training and held-out pairs that also have labels."""
    Path("pairs.jsonl").write_text(make_pairs(1, 10))
    Path("held.jsonl").write_text(make_pairs(100, 3))
    Path("preference.yaml").write_text((CONFIG + SHARED_CONFIG).format(model=workspace.model))
    return workspace


@pytest.mark.parametrize(("changes", "expected"), [
    (("loss=dpoo",), "'dpo'"),
    (("loss.beta=0",), "loss.beta: "),
    (("loss=robust", "loss.label_smoothing=0.5"), "loss.label_smoothing: "),
    (("loss=[]",), "loss: "),
    (("ld_alpha=2",), "ld_alpha: "),
    (("loss=[dpo,sft]", "ld_alpha=0.5"), "ld_alpha: "),
    (("loss=kto", "ld_alpha=0.5"), "ld_alpha: "),
    (UNPAIRED[1:], "eval_data: "),
    (("adapter=none", "reference=disable_adapter"), "reference: disable_adapter"),
    (("adapter.modules_to_save=norms", "reference=disable_adapter"), "reference: disable_adapter"),
    (("loss=orpo", "reference=copy"), "reference: copy"),
    (("loss=[cpo,sft]", "reference=precomputed"), "reference: precomputed"),
    (("loss=simpo", "adapter=none", "reference=disable_adapter"), "reference: disable_adapter"),
    (("loss=kto", "reference=precomputed"), "reference: precomputed"),
    (UNPAIRED, "dpo"),
    (("data.kind=chat",), "data.kind: "),
])  # fmt: skip
def test_config_errors_name_the_key(changes: tuple[str, ...], expected: str, preference_workspace: Workspace) -> None:
    result = preference_workspace.run_tune(*RUN, *changes)
    assert result.code == 2
    assert expected in result.err and "Traceback" not in result.err


@pytest.mark.parametrize("changes", [
    ("loss=[{kind: dpo}, {kind: sft, weight: 0.5}]", "reference=precomputed", "data.packing=true"),
    ("loss=bco", *UNPAIRED),
    ("loss=[kto, aot]", "adapter=none"),
], ids=["rpo, cached", "bco", "kto and aot"])  # fmt: skip
def test_stopped_run_resumes_bit_exactly(
    changes: tuple[str, ...], preference_workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert preference_workspace.run_tune(*RUN, *changes, "output_dir=whole").code == 0
    stop_after(monkeypatch, 2)
    assert preference_workspace.run_tune(*RUN, *changes, "output_dir=stopped").code == 143
    assert preference_workspace.run_tune(*RUN, *changes, "output_dir=stopped").code == 0
    assert preference_workspace.is_same_run("stopped", "whole")


def test_metrics_of_steps_and_evaluations(preference_workspace: Workspace) -> None:
    """Also checks that the saved config reproduces the run."""
    assert preference_workspace.run_tune(*RUN).code == 0
    lines = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    for line in steps:
        assert {f"rewards/{name}" for name in REWARD_METRICS} | {
            "logps/chosen",
            "logps/rejected",
            "entropy",
        } <= line.keys()
        assert line["rewards/margins"] == pytest.approx(line["rewards/chosen"] - line["rewards/rejected"], abs=1e-5)
    evaluations = [line for line in lines if "eval/loss" in line]
    assert [line["step"] for line in evaluations] == [0, 3, 5]
    assert evaluations[0]["eval/loss"] == pytest.approx(0.6931472, rel=1e-6)
    assert all(f"eval/rewards/{name}" in evaluations[0] for name in REWARD_METRICS)
    assert yaml.safe_load(Path("out/config.yaml").read_text())["loss"][0]["kind"] == "dpo"
    assert preference_workspace.run_tune("run", "preference", "out/config.yaml", "output_dir=again").code == 0
    assert preference_workspace.is_same_run("again", "out")


def test_precomputed_reference_covers_all_epochs(preference_workspace: Workspace) -> None:
    """Each epoch of the mixture has other rows."""
    data = (
        "data={kind: mixture, max_length: 64, datasets: [{dataset: {kind: preference, source: pairs.jsonl}, "
        "max_samples_per_epoch: 4}]}"
    )
    for reference in ("disable_adapter", "precomputed"):
        result = preference_workspace.run_tune(
            *RUN, data, "eval_data=null", f"reference={reference}", f"output_dir={reference}"
        )
        assert result.code == 0, result.err
    online, cached = (read_losses(name) for name in ("disable_adapter", "precomputed"))
    assert cached == pytest.approx(online, abs=1e-6) and len(online) == 5


def test_precomputed_reference_includes_the_initial_adapter(preference_workspace: Workspace) -> None:
    """Training starts from it, so all log-ratios are 0 before the first step."""
    options = ("eval_data=null", "adapter.dropout=0")
    for lr in ("1e-2", "2e-2"):
        assert (
            preference_workspace.run_tune(*RUN, *options, f"optimizer.lr={lr}", "output_dir=start", "--overwrite").code
            == 0
        )
        result = preference_workspace.run_tune(
            *RUN, *options, "adapter.adapter_path=start/final", "reference=precomputed", "output_dir=on", "--overwrite"
        )
        assert result.code == 0, result.err
        assert read_losses("on")[0] == pytest.approx(0.6931472, rel=1e-6)


def test_cached_reference_is_bound_to_model_and_rows(
    preference_workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache of another run is reused if model and rows are unchanged. --overwrite discards the cache."""
    calls, original = [], reference_model.compute_reference_logps
    monkeypatch.setattr(reference_model, "compute_reference_logps", lambda *args: calls.append(1) or original(*args))
    shutil.copytree(preference_workspace.model, "model")
    files = ("reference.npz", "eval/reference.npz")

    def count_reference_passes(out: str, *changes: str, source: str | None = None) -> int:
        """Number of passes over the data for the reference, with the cache of the run `source`."""
        for file in ("config.yaml", *files) if source is not None else ():
            Path(out, file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(source or "", file), Path(out, file))
        calls.clear()
        result = preference_workspace.run_tune(
            *RUN, "model=model", "reference=precomputed", "max_steps=1", *changes, f"output_dir={out}"
        )
        assert result.code == 0, result.err
        return len(calls)

    assert count_reference_passes("one") == 2
    assert count_reference_passes("same", "optimizer.lr=1e-3", "global_batch_size=2", source="one") == 0
    for number, change in enumerate(
        ("ld_alpha=0.5", "adapter.rank=2", "precision.compute_dtype=bf16", "quantization=nf4", "seed=2")
    ):
        assert count_reference_passes(f"other{number}", change, source="one") == 2, change
    shutil.copy("pairs.jsonl", "before.jsonl")
    Path("pairs.jsonl").write_text(make_pairs(2, 10))
    assert count_reference_passes("rows", source="one") == 1
    shutil.copy("before.jsonl", "pairs.jsonl")
    Path("model/model.safetensors").touch()
    assert count_reference_passes("model2", source="one") == 2
    assert count_reference_passes("model2", "--overwrite") == 2


def test_precomputed_reference_covers_rows_after_a_rollback(
    preference_workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollback reaches epochs that the run would otherwise not start, and each epoch of this mixture has other
    rows.
    """
    data = (
        "data={kind: mixture, max_length: 64, datasets: [{dataset: {kind: preference, source: pairs.jsonl}, "
        "max_samples_per_epoch: 4}]}"
    )
    original = StepGuard.find_anomaly

    def detect_spike(guard: StepGuard, step: int, loss: float, grad_norm: float) -> Anomaly | None:
        anomaly = original(guard, step, loss, grad_norm)
        return guard.limit_action(step, "spike", "rollback") if guard.data_step(step) == 1 else anomaly

    monkeypatch.setattr(StepGuard, "find_anomaly", detect_spike)
    options = ("step_guard.spike_factor=20", "step_guard.on_spike=rollback", "save_every=9", "max_steps=2")
    for reference in ("disable_adapter", "precomputed"):
        result = preference_workspace.run_tune(
            *RUN, data, "eval_data=null", *options, f"reference={reference}", f"output_dir={reference}"
        )
        assert result.code == 0 and "Rolled back to step 0" in result.err, result.err
    online, cached = (read_losses(name) for name in ("disable_adapter", "precomputed"))
    assert cached == pytest.approx(online, abs=1e-6) and len(online) == 2


def read_losses(out: str) -> list[float]:
    lines = map(json.loads, Path(out, "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def test_running_mean_ignores_nan() -> None:
    shift = RunningMean()
    assert shift.take(torch.tensor([1.0, 3.0])) == 2
    assert shift.take(torch.tensor([torch.nan, 5.0])) == 2
    assert shift.take(torch.tensor([5.0])) == 3


@pytest.mark.parametrize("label", [1, "true"])
def test_non_boolean_label_is_an_error(label: object, preference_workspace: Workspace) -> None:
    Path("pairs.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b", "label": label}) + "\n")
    result = preference_workspace.run_tune(*RUN, "loss=kto", "data={source: pairs.jsonl}", "eval_data=null")
    assert result.code == 2 and "pairs.jsonl:1: label: " in result.err
