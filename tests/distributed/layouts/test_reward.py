"""Reward training gives the same steps on one and two processes, packed or padded, with any kind of rows."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.distributed.layouts.test_layouts import DENSE
from tests.distributed.layouts.test_preference import RunResult
from tests.helpers.random_checkpoints import FP32, build, save
from tests.helpers.ranks import run_ranks
from tests.helpers.recipe_results import run_recipe
from tunekit.adapters.config import DoRAConfig, LoRAConfig
from tunekit.data.reward_datasets import LabeledDataset, StepwiseDataset
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.losses.reward import Classification, ProcessReward, Regression
from tunekit.optim.config import AdamWConfig, ConstantLRConfig
from tunekit.quantization.config import NF4Config
from tunekit.recipes import reward

NUM_ROWS, NUM_EVAL_ROWS, LENGTH = 5, 3, 40


def random_text(generator: torch.Generator) -> str:
    count = int(torch.randint(1, 9, (1,), generator=generator))
    return " ".join(f"w{int(i)}" for i in torch.randint(0, 60, (count,), generator=generator))


@pytest.fixture(scope="module")
def base_config(tmp_path_factory: pytest.TempPathFactory) -> reward.RewardConfig:
    """Each step sees all rows. Their number is odd, so one of two ranks has fewer of them."""
    folder, generator = tmp_path_factory.mktemp("reward"), torch.Generator().manual_seed(5)
    for name, count in (("rows", NUM_ROWS), ("held", NUM_EVAL_ROWS)):
        lines = []
        for i in range(count):
            steps = [random_text(generator) for _ in range(1 + i % 3)]
            labels = [(i + j) % 2 > 0 for j in range(len(steps))]
            row = {"text": random_text(generator), "label": i % 3, "prompt": random_text(generator) + "\n"}
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


def make_configs(base_config: reward.RewardConfig) -> dict[str, reward.RewardConfig]:
    train_rows, eval_rows = base_config.data, base_config.eval_data
    assert isinstance(train_rows, LabeledDataset) and isinstance(eval_rows, LabeledDataset)
    steps, eval_steps = (
        StepwiseDataset(dataset.source, max_length=LENGTH, step_separator=" w7 ") for dataset in (train_rows, eval_rows)
    )
    configs = {
        "values": base_config,
        "classes": replace(base_config, loss=Classification(3), adapter=LoRAConfig(4), quantization=NF4Config()),
        "steps": replace(base_config, loss=ProcessReward(), data=steps, eval_data=eval_steps, adapter=DoRAConfig(4)),
    }
    packed = {
        f"{name}, packed": replace(
            cfg,
            data=replace(cfg.data, packing=True),
            eval_data=replace(cfg.eval_data, packing=True),
            micro_batch_size=2,
        )
        for name, cfg in configs.items()
    }
    return configs | packed


@pytest.mark.multi
@pytest.mark.slow
def test_two_ranks_match_one_process(base_config: reward.RewardConfig, tmp_path: Path) -> None:
    single = {
        name: replace(cfg, output_dir=str(tmp_path / "alone" / name)) for name, cfg in make_configs(base_config).items()
    }
    parallel_configs = {
        name: replace(cfg, output_dir=str(tmp_path / "two" / name)) for name, cfg in make_configs(base_config).items()
    }
    parallel_configs["steps, context"] = replace(
        parallel_configs["steps"], output_dir=str(tmp_path / "two" / "context"), parallel=ParallelConfig(cp=2)
    )
    run_recipe("reward", list(single.values()))
    *others, verified = parallel_configs.values()
    run_ranks(2, run_recipe, "reward", others, verified)
    results = {name: RunResult.read(Path(cfg.output_dir)) for name, cfg in single.items()}
    for name, expected in results.items():
        assert expected.metrics["loss"][-1] < expected.metrics["loss"][0], "the loss decreased"
        assert expected.max_difference(results[name.removesuffix(", packed")]) < 1e-5, name
    for name, cfg in parallel_configs.items():
        assert RunResult.read(Path(cfg.output_dir)).max_difference(results[name.removesuffix(", context")]) < 1e-5, name
