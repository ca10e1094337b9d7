"""Continuous batching with sharded weights: ranks with fewer requests take part in each pass."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.compare_layouts import DENSE, SPARSE
from tests.helpers.engine_ranks import Answers, EngineCase, run_engines
from tests.helpers.random_checkpoints import build, random_tokens, save
from tests.helpers.ranks import run_ranks
from tunekit.distributed.parallel_dims import ParallelConfig

PROMPTS = {"a" * (i + 1): random_tokens(1, length, seed=length)[0].tolist() for i, length in enumerate((7, 1, 12, 3))}


def check(answers: list[Answers], expected: Answers) -> None:
    merged = {name: answer for part in answers for name, answer in part.items()}
    assert merged.keys() == expected.keys()
    for name, answer in expected.items():
        assert [token for token, _ in merged[name]] == [token for token, _ in answer]
        assert max(abs(a - b) for (_, a), (_, b) in zip(merged[name], answer, strict=True)) < 1e-4


@pytest.mark.multi
def test_two_ranks_generate_what_one_process_generates(tmp_path: Path) -> None:
    dense, experts = save(build(DENSE), tmp_path / "dense"), save(build(SPARSE), tmp_path / "experts")
    cases = {
        "shard": EngineCase(dense, ParallelConfig(), PROMPTS, {"a": 1}),
        "shard, idle rank": EngineCase(dense, ParallelConfig(), PROMPTS, {}),
        "tensor": EngineCase(dense, ParallelConfig(tp=2), PROMPTS, {}),
        "experts": EngineCase(experts, ParallelConfig(ep=2), PROMPTS, {"aa": 1, "aaa": 1}),
    }
    first, second = (dict(zip(cases, rank, strict=True)) for rank in run_ranks(2, run_engines, [*cases.values()]))
    assert not second["shard, idle rank"]
    alone = [replace(case, parallel=ParallelConfig()) for case in cases.values()]
    for name, expected in zip(cases, run_engines(alone), strict=True):
        check([first[name], second[name]], expected)
