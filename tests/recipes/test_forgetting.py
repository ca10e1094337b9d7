"""Forgetting detection: the run is stopped with its state saved when the loss on known data rises."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.forgetting_run import train_and_report
from tests.helpers.ranks import run_ranks
from tests.helpers.recipe_runs import addition_rows
from tunekit import assets, build
from tunekit.adapters.config import LoRAConfig
from tunekit.config.load import load_config
from tunekit.data.datasets import ChatDataset
from tunekit.errors import FieldError, UserError
from tunekit.models.precision import PrecisionConfig
from tunekit.models.spec import ScoreHead
from tunekit.optim.config import AdamWConfig
from tunekit.recipes import evaluate, sft
from tunekit.training.config import ForgettingConfig

FORGETTING = (
    "forgetting={data: {kind: chat, source: known.jsonl, max_length: 64}, eval_every: 2, max_loss_increase: 0.2}"
)


@pytest.fixture
def train_on_unrelated_rows(workspace, memorized_run: Path):
    """Function that trains a memorized model on unrelated rows."""
    (workspace.folder / "known.jsonl").write_text(addition_rows(1, 4))
    rows = [{"role": role, "content": text} for role, text in (("user", "Say it."), ("assistant", "Never, never, no"))]
    (workspace.folder / "rows.jsonl").write_text(8 * (json.dumps({"messages": rows}) + "\n"))

    def tune(*args: str):
        return workspace.run_tune(
            "run", "sft", "sft.yaml", f"model={memorized_run}/final", FORGETTING, "eval_data=null", *args
        )

    return tune


def forgetting_losses(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["forgetting/loss"] for line in lines if "forgetting/loss" in line}


def test_forgetting_stops_the_run(train_on_unrelated_rows, workspace):
    done = train_on_unrelated_rows("optimizer.lr=3e-2", "max_steps=9", "save_every=100")
    assert done.code == 2
    losses = forgetting_losses(workspace.folder / "out")
    first, *_, last = losses.values()
    assert max(losses) < 9, "before the last step"
    assert last - first > 0.2
    assert f"at step {max(losses)}, the loss on known.jsonl (train) rose from {first:.4f} to {last:.4f}" in done.err
    assert (workspace.folder / f"out/state/{max(losses):08d}").is_dir()
    assert "out/state" in done.err
    second = train_on_unrelated_rows("optimizer.lr=3e-2", "max_steps=9", "save_every=100")
    assert second.code == 2, "the run does not resume"
    assert f"step {max(losses)}, the loss on known.jsonl" in second.err
    with_warnings = train_on_unrelated_rows(
        "optimizer.lr=3e-2", "max_steps=9", "save_every=100", "forgetting.on_exceed=warn"
    )
    assert with_warnings.code == 0, with_warnings.err
    assert "step 8, the loss on known.jsonl (train) rose" in with_warnings.err
    assert list(forgetting_losses(workspace.folder / "out")) == [0, 2, 4, 6, 8, 9]


def test_forgetting_loss_matches_evaluate(train_on_unrelated_rows, workspace, memorized_run):
    assert train_on_unrelated_rows("optimizer.lr=1e-5", "max_steps=3").code == 0, "a low learning rate is not stopped"
    losses = forgetting_losses(workspace.folder / "out")
    assert list(losses) == [0, 2, 3]
    data = ChatDataset("known.jsonl", max_length=64)
    cfg = evaluate.EvaluateConfig(
        model="out", baseline=str(memorized_run), data=data, precision=PrecisionConfig("fp32"), device="cpu"
    )
    before, after = evaluate.main(cfg)
    assert losses[0] == pytest.approx(before.loss, rel=1e-5)
    assert losses[3] == pytest.approx(after.loss, rel=1e-5)


def test_resumed_run_keeps_the_initial_loss(train_on_unrelated_rows, workspace):
    args = (
        "optimizer.lr=1e-3",
        "forgetting.max_loss_increase=100",
        "max_steps=6",
        "lr_scheduler=constant",
        "output_dir=parts",
        "save_every=1",
        "save_total_limit=9",
    )
    assert train_on_unrelated_rows(*args).code == 0
    losses = forgetting_losses(workspace.folder / "parts")
    shutil.rmtree(workspace.folder / "parts/final")
    for step in (4, 5, 6):
        shutil.rmtree(workspace.folder / f"parts/state/{step:08d}")
    assert train_on_unrelated_rows(*args).code == 0
    assert forgetting_losses(workspace.folder / "parts") == losses
    shutil.rmtree(workspace.folder / "parts/final")
    (workspace.folder / "known.jsonl").write_text(addition_rows(1, 3))
    changed = train_on_unrelated_rows(*args)
    assert changed.code == 2
    assert "forgetting.data: " in changed.err


def test_invalid_values_name_their_field():
    for name, value in (
        ("eval_every", 0),
        ("max_loss_increase", 0.0),
        ("data", ChatDataset("rows.jsonl", streaming=True)),
    ):
        with pytest.raises(FieldError) as caught:
            ForgettingConfig(**{"data": ChatDataset("rows.jsonl"), name: value})
        assert caught.value.field == name


def test_reward_model_is_refused(memorized_run):
    cfg = sft.SFTConfig(model=str(memorized_run / "final"), data=ChatDataset("rows.jsonl"), output_dir="out")
    spec = build.read_checkpoint(cfg).spec.with_score_head(ScoreHead(1))
    with pytest.raises(UserError, match="forgetting"):
        ForgettingConfig(ChatDataset("rows.jsonl")).check(spec, cfg.open_tokenizer())


@pytest.mark.multi
def test_two_ranks_stop_at_the_same_step(train_on_unrelated_rows, workspace, memorized_run):
    args = [
        f"model={memorized_run}/final",
        FORGETTING,
        "eval_data=null",
        "optimizer.lr=3e-2",
        "max_steps=9",
        "output_dir=one",
    ]
    cfg = load_config(sft.SFTConfig, Path("sft.yaml"), args)
    expected = train_and_report(cfg)
    assert "the loss on" in expected
    assert run_ranks(2, train_and_report, replace(cfg, output_dir="two")) == [expected, expected]
    losses = forgetting_losses(workspace.folder / "two")
    for step, loss in forgetting_losses(workspace.folder / "one").items():
        assert losses[step] == pytest.approx(loss, rel=1e-4)


@pytest.mark.slow
def test_nano_with_a_high_lr_is_stopped(tmp_path: Path) -> None:
    forgetting = ForgettingConfig(
        ChatDataset(str(assets.TASKS["nano/stories"]), max_length=512, max_samples=16), eval_every=3
    )
    cfg = sft.SFTConfig(
        model="tunekit/nano",
        data=ChatDataset(str(assets.DATA["tunekit/tools"]), max_length=256, max_samples=96),
        output_dir=str(tmp_path / "fast"),
        adapter=LoRAConfig(),
        optimizer=AdamWConfig(lr=1e-2),
        forgetting=forgetting,
        global_batch_size=8,
        micro_batch_size=8,
        max_steps=12,
    )
    with pytest.raises(UserError, match="stories.jsonl .train. "):
        sft.main(cfg)
    gentle = replace(cfg, output_dir=str(tmp_path / "slow"), optimizer=AdamWConfig(lr=1e-4))
    sft.main(gentle)
    assert (tmp_path / "slow/final").is_dir()
