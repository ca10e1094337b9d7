"""Inference on several devices, with replicated or sharded weights."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers import harness_tasks
from tests.helpers.inference_runs import evaluate_and_generate
from tests.helpers.ranks import run_ranks
from tests.helpers.recipe_runs import addition_rows
from tunekit.data.datasets import ChatDataset
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.generation.sampling import SamplingConfig
from tunekit.models.precision import PrecisionConfig
from tunekit.recipes import evaluate, generate

REPLICATED, SHARDED, TENSOR_PARALLEL = (
    ParallelConfig(dp_replicate=None, dp_shard=1),
    ParallelConfig(),
    ParallelConfig(tp=2),
)


@pytest.mark.multi
@pytest.mark.slow
def test_two_ranks_give_the_answers_of_one(memorized_run: Path, tmp_path: Path) -> None:
    rows = tmp_path / "chats.jsonl"
    rows.write_text(addition_rows(1, 7))
    precision, sampling = PrecisionConfig("fp32"), SamplingConfig(max_new_tokens=12)
    prompts = tuple(f"What is {n} plus {n * n}?" for n in range(1, 8))
    data = ChatDataset(str(rows), max_length=64)
    options = {"sampling": sampling, "precision": precision, "device": "cpu"}
    task_options = {
        "tasks": ("nano/facts", *harness_tasks.TASKS),
        "include_path": str(harness_tasks.write(tmp_path)),
        "limit": 7,
    }
    evaluate_cfg = evaluate.EvaluateConfig(model=str(memorized_run), data=data, batch_size=2, **task_options, **options)
    generate_cfg = generate.GenerateConfig(model=str(memorized_run), prompts=prompts, max_num_seqs=2, **options)
    single_path, multi_path = tmp_path / "one", tmp_path / "two"
    (expected,) = evaluate_and_generate(
        replace(generate_cfg, output_path=str(single_path)), evaluate_cfg, [ParallelConfig()]
    )
    layouts = [REPLICATED, SHARDED, TENSOR_PARALLEL]
    for results_by_layout in run_ranks(
        2, evaluate_and_generate, replace(generate_cfg, output_path=str(multi_path)), evaluate_cfg, layouts, limit=300
    ):
        for index, results in enumerate(results_by_layout):
            assert Path(f"{multi_path}-{index}").read_text() == Path(f"{single_path}-0").read_text()
            assert [result.answers for result in results] == [result.answers for result in expected]
            for name, metric in expected[0].metrics.items():
                assert results[0].metrics[name].value == pytest.approx(metric.value, rel=1e-5), name
    assert expected[0].num_correct >= 4
