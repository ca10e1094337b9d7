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
from tunekit.adapters.config import DoRAConfig, LoRAConfig
from tunekit.data.reward_datasets import LabeledDataset, StepwiseDataset
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.losses.reward import Classification, ProcessReward, Regression
from tunekit.optim.config import AdamWConfig, ConstantLRConfig
from tunekit.quantization.config import NF4Config
from tunekit.recipes import reward

ROWS, HELD, LENGTH = 5, 3, 40


def words(draw: torch.Generator) -> str:
    count = int(torch.randint(1, 9, (1,), generator=draw))
    return " ".join(f"w{int(i)}" for i in torch.randint(0, 60, (count,), generator=draw))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> reward.RewardConfig:
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
    return reward.RewardConfig(
        model=str(save(build(DENSE), folder / "model")),
        data=LabeledDataset(str(folder / "rows.jsonl"), max_length=LENGTH),
        eval_data=LabeledDataset(str(folder / "held.jsonl"), max_length=LENGTH),
        loss=Regression(),
        output_dir=str(folder / "out"),
        optimizer=AdamWConfig(lr=0.003, eps=0.1),
        lr_scheduler=ConstantLRConfig(),
        precision=FP32,
        data_checks="warn",
        device="cpu",
        global_batch_size=64,
        epochs=3,
        eval_every=2,
    )


def cases(base: reward.RewardConfig) -> dict[str, reward.RewardConfig]:
    rows, held = base.data, base.eval_data
    assert isinstance(rows, LabeledDataset) and isinstance(held, LabeledDataset)
    steps, others = (StepwiseDataset(one.source, max_length=LENGTH, step_separator=" w7 ") for one in (rows, held))
    found = {
        "values": base,
        "classes": replace(base, loss=Classification(3), adapter=LoRAConfig(4), quantization=NF4Config()),
        "steps": replace(base, loss=ProcessReward(), data=steps, eval_data=others, adapter=DoRAConfig(4)),
    }
    packed = {
        f"{name}, packed": replace(
            cfg,
            data=replace(cfg.data, packing=True),
            eval_data=replace(cfg.eval_data, packing=True),
            micro_batch_size=2,
        )
        for name, cfg in found.items()
    }
    return found | packed


def ran(cfgs: list[reward.RewardConfig]) -> None:
    torch.set_num_threads(1)
    for cfg in cfgs:
        reward.main(cfg)


@pytest.mark.multi
@pytest.mark.slow
def test_two_ranks(base: reward.RewardConfig, tmp_path: Path) -> None:
    alone = {name: replace(cfg, output_dir=str(tmp_path / "alone" / name)) for name, cfg in cases(base).items()}
    two = {name: replace(cfg, output_dir=str(tmp_path / "two" / name)) for name, cfg in cases(base).items()}
    two["steps, context"] = replace(
        two["steps"], output_dir=str(tmp_path / "two" / "context"), parallel=ParallelConfig(cp=2)
    )
    ran(list(alone.values()))
    on(2, ran, list(two.values()))
    ended = {name: Ended.of(Path(cfg.output_dir)) for name, cfg in alone.items()}
    for name, wanted in ended.items():
        assert wanted.figures["loss"][-1] < wanted.figures["loss"][0], "something was learnt"
        assert wanted.apart(ended[name.removesuffix(", packed")]) < 1e-5, name
    for name, cfg in two.items():
        assert Ended.of(Path(cfg.output_dir)).apart(ended[name.removesuffix(", context")]) < 1e-5, name
