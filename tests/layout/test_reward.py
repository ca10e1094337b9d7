"""What scores is trained the same on one process and on two that share it, packed or padded, whatever rows say."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.checkpoints import FP32, build, save
from tests.layout.test_layouts import DENSE
from tests.layout.test_preference import Ended
from tests.parallel.ranks import on
from tunekit.adapters import DoRA, LoRA
from tunekit.data.labels import Labelled, Stepped
from tunekit.formats import NF4
from tunekit.losses.reward import Classification, Process, Regression
from tunekit.optim import AdamW, Constant
from tunekit.parallel.choice import Parallel
from tunekit.recipes import reward

ROWS, HELD, LENGTH = 5, 3, 40


def words(draw: torch.Generator) -> str:
    count = int(torch.randint(1, 9, (1,), generator=draw))
    return " ".join(f"w{int(i)}" for i in torch.randint(0, 60, (count,), generator=draw))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> reward.Reward:
    """Each step sees all rows. Their number is odd, so one of two ranks has fewer of them."""
    folder, draw = tmp_path_factory.mktemp("reward"), torch.Generator().manual_seed(5)
    for name, count in (("rows", ROWS), ("held", HELD)):
        lines = []
        for i in range(count):
            steps = [words(draw) for _ in range(1 + i % 3)]
            labels = [(i + j) % 2 > 0 for j in range(len(steps))]
            row = {"text": words(draw), "label": i % 3, "prompt": words(draw) + "\n"}
            lines.append(json.dumps(row | {"completions": steps, "labels": labels}) + "\n")
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return reward.Reward(
        model=str(save(build(DENSE), folder / "model")),
        data=Labelled(str(folder / "rows.jsonl"), length=LENGTH),
        validation=Labelled(str(folder / "held.jsonl"), length=LENGTH),
        loss=Regression(),
        out=str(folder / "out"),
        optimizer=AdamW(lr=0.003, eps=0.1),
        schedule=Constant(),
        precision=FP32,
        checks="tell",
        device="cpu",
        batch=64,
        epochs=3,
        validate_every=2,
    )


def cases(base: reward.Reward) -> dict[str, reward.Reward]:
    rows, held = base.data, base.validation
    assert isinstance(rows, Labelled) and isinstance(held, Labelled)
    steps, others = (Stepped(one.source, length=LENGTH, separator=" w7 ") for one in (rows, held))
    found = {
        "values": base,
        "classes": replace(base, loss=Classification(3), adapter=LoRA(4), weights=NF4()),
        "steps": replace(base, loss=Process(), data=steps, validation=others, adapter=DoRA(4)),
    }
    packed = {
        f"{name}, packed": replace(
            cfg, data=replace(cfg.data, pack=True), validation=replace(cfg.validation, pack=True), micro_batch=2
        )
        for name, cfg in found.items()
    }
    return found | packed


def ran(cfgs: list[reward.Reward]) -> None:
    torch.set_num_threads(1)
    for cfg in cfgs:
        reward.main(cfg)


@pytest.mark.multi
@pytest.mark.slow
def test_two_ranks(base: reward.Reward, tmp_path: Path) -> None:
    alone = {name: replace(cfg, out=str(tmp_path / "alone" / name)) for name, cfg in cases(base).items()}
    two = {name: replace(cfg, out=str(tmp_path / "two" / name)) for name, cfg in cases(base).items()}
    two["steps, context"] = replace(two["steps"], out=str(tmp_path / "two" / "context"), parallel=Parallel(context=2))
    ran(list(alone.values()))
    on(2, ran, list(two.values()))
    ended = {name: Ended.of(Path(cfg.out)) for name, cfg in alone.items()}
    for name, wanted in ended.items():
        assert wanted.figures["loss"][-1] < wanted.figures["loss"][0], "something was learnt"
        assert wanted.apart(ended[name.removesuffix(", packed")]) < 1e-5, name
    for name, cfg in two.items():
        assert Ended.of(Path(cfg.out)).apart(ended[name.removesuffix(", context")]) < 1e-5, name
