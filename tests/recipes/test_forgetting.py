"""A run that spoils what the model could do before is told of, and ended with its state saved."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.parallel.ranks import on
from tests.recipes.conftest import sums
from tests.recipes.forgets import trained
from tunekit import assets, build
from tunekit.adapters.config import LoRAConfig
from tunekit.config.load import load_config
from tunekit.data.datasets import ChatDataset
from tunekit.errors import FieldError, UserError
from tunekit.models.precision import PrecisionConfig
from tunekit.models.spec import ScoreHead
from tunekit.optim.config import AdamWConfig
from tunekit.recipes import evaluate, sft
from tunekit.training.forgetting import ForgettingConfig

RULE = "forgetting={data: {kind: chat, source: known.jsonl, max_length: 64}, eval_every: 2, max_loss_increase: 0.2}"


@pytest.fixture
def other(work, learnt: Path):
    """Training on rows that have nothing to do with those that the model knows by heart."""
    (work.folder / "known.jsonl").write_text(sums(1, 4))
    rows = [{"role": role, "content": text} for role, text in (("user", "Say it."), ("assistant", "Never, never, no"))]
    (work.folder / "rows.jsonl").write_text(8 * (json.dumps({"messages": rows}) + "\n"))

    def tune(*words: str):
        return work.tune("run", "sft", "sft.yaml", f"model={learnt}/final", RULE, "eval_data=null", *words)

    return tune


def measured(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["forgetting/loss"] for line in lines if "forgetting/loss" in line}


def test_a_run_that_forgets_is_ended(other, work):
    done = other("optimizer.lr=3e-2", "max_steps=9", "save_every=100")
    assert done.code == 2
    found = measured(work.folder / "out")
    first, *_, last = found.values()
    assert max(found) < 9, "long before its end"
    assert last - first > 0.2
    assert f"step {max(found)}: the loss on known.jsonl (train) rose from {first:.4f} to {last:.4f} nats" in done.err
    assert (work.folder / f"out/state/{max(found):08d}").is_dir()
    assert "its state is in out/state: start over (--overwrite) with a lower optimizer.lr" in done.err
    again = other("optimizer.lr=3e-2", "max_steps=9", "save_every=100")
    assert again.code == 2, "it does not go on unasked"
    assert f"step {max(found)}: the loss on known.jsonl" in again.err
    on_it_goes = other("optimizer.lr=3e-2", "max_steps=9", "save_every=100", "forgetting.on_exceed=warn")
    assert on_it_goes.code == 0, on_it_goes.err
    assert "step 8: the loss on known.jsonl (train) rose" in on_it_goes.err
    assert list(measured(work.folder / "out")) == [0, 2, 4, 6, 8, 9]


def test_the_loss_is_that_of_evaluate(other, work, learnt):
    assert other("optimizer.lr=1e-5", "max_steps=3").code == 0, "a gentle run goes to its end"
    found = measured(work.folder / "out")
    assert list(found) == [0, 2, 3]
    data = ChatDataset("known.jsonl", max_length=64)
    asked = evaluate.EvaluateConfig(
        model="out", baseline=str(learnt), data=data, precision=PrecisionConfig("fp32"), device="cpu"
    )
    before, after = evaluate.main(asked)
    assert found[0] == pytest.approx(before.loss, rel=1e-5)
    assert found[3] == pytest.approx(after.loss, rel=1e-5)


def test_a_stopped_run_compares_with_its_beginning(other, work):
    gentle = (
        "optimizer.lr=1e-3",
        "forgetting.max_loss_increase=100",
        "max_steps=6",
        "lr_scheduler=constant",
        "output_dir=parts",
        "save_total_limit=9",
    )
    assert other(*gentle).code == 0
    whole = measured(work.folder / "parts")
    shutil.rmtree(work.folder / "parts/final")
    for step in (4, 5, 6):
        shutil.rmtree(work.folder / f"parts/state/{step:08d}")
    assert other(*gentle).code == 0
    assert measured(work.folder / "parts") == whole
    shutil.rmtree(work.folder / "parts/final")
    (work.folder / "known.jsonl").write_text(sums(1, 3))
    changed = other(*gentle)
    assert changed.code == 2
    assert "forgetting.data: these are not the rows" in changed.err


def test_what_makes_no_sense():
    for name, value in (
        ("eval_every", 0),
        ("max_loss_increase", 0.0),
        ("data", ChatDataset("rows.jsonl", streaming=True)),
    ):
        with pytest.raises(FieldError) as caught:
            ForgettingConfig(**{"data": ChatDataset("rows.jsonl"), name: value})
        assert caught.value.field == name


def test_a_model_that_scores_has_no_likelihood(learnt):
    cfg = sft.SFTConfig(model=str(learnt / "final"), data=ChatDataset("rows.jsonl"), output_dir="out")
    spec = build.read_checkpoint(cfg).spec.scoring(ScoreHead(1))
    with pytest.raises(UserError, match="a model that scores"):
        ForgettingConfig(ChatDataset("rows.jsonl")).check(spec, cfg.open_tokenizer())


@pytest.mark.multi
def test_two_devices_end_it_at_the_same_step(other, work, learnt):
    words = [f"model={learnt}/final", RULE, "eval_data=null", "optimizer.lr=3e-2", "max_steps=9", "output_dir=one"]
    cfg = load_config(sft.SFTConfig, Path("sft.yaml"), words)
    alone = trained(cfg)
    assert "the loss on" in alone
    assert on(2, trained, replace(cfg, output_dir="two")) == [alone, alone]
    found = measured(work.folder / "two")
    for step, loss in measured(work.folder / "one").items():
        assert found[step] == pytest.approx(loss, rel=1e-4)


@pytest.mark.slow
def test_a_nano_that_learns_tools_too_fast_is_caught(tmp_path: Path) -> None:
    rule = ForgettingConfig(
        ChatDataset(str(assets.TASKS["nano/stories"]), max_length=512, max_samples=16), eval_every=3
    )
    cfg = sft.SFTConfig(
        model="tunekit/nano",
        data=ChatDataset(str(assets.DATA["tunekit/tools"]), max_length=256, max_samples=96),
        output_dir=str(tmp_path / "fast"),
        adapter=LoRAConfig(),
        optimizer=AdamWConfig(lr=1e-2),
        forgetting=rule,
        global_batch_size=8,
        micro_batch_size=8,
        max_steps=12,
    )
    with pytest.raises(UserError, match="the loss on .*stories.jsonl .train. rose from"):
        sft.main(cfg)
    gentle = replace(cfg, output_dir=str(tmp_path / "slow"), optimizer=AdamWConfig(lr=1e-4))
    sft.main(gentle)
    assert (tmp_path / "slow/final").is_dir()
