"""Embedding training gives the same steps and metrics on one and two processes, packed or padded, for all losses."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.distributed.layouts.test_layouts import DENSE
from tests.distributed.layouts.test_preference import RunResult
from tests.distributed.layouts.test_reward import random_text
from tests.helpers.random_checkpoints import FP32, build, save
from tests.helpers.ranks import run_ranks
from tests.helpers.recipe_results import run_recipe
from tunekit.adapters.config import LoRAConfig
from tunekit.data.embedding_datasets import RetrievalDataset, SimilarityDataset
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.loggers import metrics_file
from tunekit.losses.embedding import CoSENT, MultipleNegativesRanking
from tunekit.optim.config import AdamWConfig, ConstantLRConfig
from tunekit.quantization.config import NF4Config
from tunekit.recipes import embed

LENGTH = 20


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, embed.EmbedConfig]:
    """Each step sees all rows. Their number is odd, so one of two ranks has fewer of them."""
    folder, generator = tmp_path_factory.mktemp("embed"), torch.Generator().manual_seed(5)
    for file, count in (("rows", 7), ("eval", 5)):
        names = ("query", "positive", "negative", "sentence1", "sentence2")
        rows = [{name: random_text(generator) for name in names} | {"score": i % 3} for i in range(count)]
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train, evaluation = (str(folder / f"{file}.jsonl") for file in ("rows", "eval"))
    pairs = embed.EmbedConfig(
        model=str(save(build(DENSE), folder / "model")),
        data=RetrievalDataset(train, max_length=LENGTH),
        eval_data=RetrievalDataset(evaluation, max_length=LENGTH),
        loss=MultipleNegativesRanking(scale=5.0, matryoshka_dims=(128, 32)),
        output_dir=str(folder / "out"),
        optimizer=AdamWConfig(lr=0.003, eps=0.1),
        lr_scheduler=ConstantLRConfig(),
        precision=FP32,
        data_checks="warn",
        device="cpu",
        global_batch_size=64,
        micro_batch_size=2,
        max_steps=3,
        eval_every=2,
    )
    scored = replace(
        pairs, loss=CoSENT(), data=SimilarityDataset(train, max_length=LENGTH), adapter=LoRAConfig(4),
        eval_data=SimilarityDataset(evaluation, max_length=LENGTH), quantization=NF4Config(), pooling="mean",
    )  # fmt: skip
    packed = {
        f"{name}, packed": replace(
            cfg, data=replace(cfg.data, packing=True), eval_data=replace(cfg.eval_data, packing=True)
        )
        for name, cfg in (("pairs", pairs), ("scored", scored))
    }
    return {"pairs": pairs, "scored": scored, **packed}


def eval_metrics(cfg: embed.EmbedConfig) -> list[float]:
    """All metrics of all evaluations."""
    lines = metrics_file.read_metrics(Path(cfg.output_dir))
    return [line[name] for line in lines for name in sorted(line) if name.startswith("eval/")]


@pytest.mark.multi
@pytest.mark.slow
def test_two_ranks_match_one_process(configs: dict[str, embed.EmbedConfig], tmp_path: Path) -> None:
    single, two = (
        {name: replace(cfg, output_dir=str(tmp_path / kind / name)) for name, cfg in configs.items()}
        for kind in ("one", "two")
    )
    for name in configs:
        context = ParallelConfig(cp=2)
        two[f"{name}, context"] = replace(two[name], output_dir=f"{two[name].output_dir}-context", parallel=context)
    run_recipe("embed", list(single.values()))
    *others, verified = two.values()
    run_ranks(2, run_recipe, "embed", others, verified)
    results = {name: RunResult.read(Path(cfg.output_dir)) for name, cfg in single.items()}
    for name, expected in results.items():
        assert len(set(expected.metrics["loss"])) == 3, "the loss changed"
        assert expected.max_difference(results[name.removesuffix(", packed")]) < 1e-5, name
    for name, cfg in two.items():
        assert eval_metrics(cfg) == pytest.approx(eval_metrics(single[name.removesuffix(", context")]), abs=1e-5), name
        assert RunResult.read(Path(cfg.output_dir)).max_difference(results[name.removesuffix(", context")]) < 1e-5, name
