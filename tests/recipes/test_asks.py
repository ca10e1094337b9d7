"""Models are asked on several devices: as copies that share the rows, or with weights that are divided."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.evaluation import own
from tests.parallel.ranks import on
from tests.recipes.asks import both
from tests.recipes.conftest import sums
from tunekit.data.datasets import ChatDataset
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.generation.generate import SamplingConfig
from tunekit.models.precision import PrecisionConfig
from tunekit.recipes import evaluate, generate

COPIES, DIVIDED, SPLIT = ParallelConfig(dp_replicate=None, dp_shard=1), ParallelConfig(), ParallelConfig(tp=2)


@pytest.mark.multi
@pytest.mark.slow
def test_two_devices_answer_as_one(learnt: Path, tmp_path: Path) -> None:
    rows = tmp_path / "chats.jsonl"
    rows.write_text(sums(1, 7))
    exact, sampling = PrecisionConfig("fp32"), SamplingConfig(max_new_tokens=12)
    prompts = tuple(f"What is {n} plus {n * n}?" for n in range(1, 8))
    data = ChatDataset(str(rows), max_length=64)
    how = {"sampling": sampling, "precision": exact, "batch_size": 2, "device": "cpu"}
    named = {"tasks": ("nano/facts", *own.TASKS), "include_path": str(own.write(tmp_path)), "limit": 7}
    measured = evaluate.EvaluateConfig(model=str(learnt), data=data, **named, **how)
    asked = generate.GenerateConfig(model=str(learnt), prompts=prompts, **how)
    one, two = tmp_path / "one", tmp_path / "two"
    (wanted,) = both(replace(asked, output_path=str(one)), measured, [ParallelConfig()])
    layouts = [COPIES, DIVIDED, SPLIT]
    for found in on(2, both, replace(asked, output_path=str(two)), measured, layouts, limit=300):
        for number, results in enumerate(found):
            assert Path(f"{two}-{number}").read_text() == Path(f"{one}-0").read_text()
            assert [result.answers for result in results] == [result.answers for result in wanted]
            for name, figure in wanted[0].metrics.items():
                assert results[0].metrics[name].value == pytest.approx(figure.value, rel=1e-5), name
    assert wanted[0].num_correct >= 4
