"""Distillation gives the same results on any layout, including the answers that the student generates."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.compare_layouts import DENSE, PROPORTIONAL, relative_differences
from tests.helpers.distillation_steps import DistillCase, run_distillation_cases
from tests.helpers.random_checkpoints import build, save
from tests.helpers.ranks import run_ranks
from tunekit.adapters.config import LoRAConfig
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.losses.kl_divergence import ForwardKL, ReverseKL, SkewedKL
from tunekit.quantization.config import NF4Config


@pytest.fixture(scope="module")
def distill_case(tmp_path_factory: pytest.TempPathFactory) -> DistillCase:
    """A student, and a deeper teacher with a padded vocabulary."""
    root = tmp_path_factory.mktemp("models")
    student = save(build(DENSE), root / "student")
    teacher = save(build(DENSE | {"num_hidden_layers": 3, "vocab_size": 99}, seed=1), root / "teacher")
    return DistillCase(student, teacher=teacher, optimizer=PROPORTIONAL, steps=2)


def check_outcomes(actual: list, expected: list, cases: dict[str, DistillCase], limit: float = 1e-5) -> None:
    differences = {name: max(relative_differences(a, b)) for name, a, b in zip(cases, actual, expected, strict=True)}
    assert max(differences.values()) < limit, differences


def test_micro_batch_size_does_not_change_results(distill_case: DistillCase) -> None:
    for case in (distill_case, replace(distill_case, packed=True, top=7), replace(distill_case, share=0.6)):
        cases = {"one": case, "two": replace(case, micro_batch=2), "all": replace(case, micro_batch=4)}
        reference, *rest = run_distillation_cases([*cases.values()])
        check_outcomes([reference, reference, *rest][1:], [reference] * len(cases), cases)


def test_on_policy_rows_depend_only_on_seed_and_step(distill_case: DistillCase) -> None:
    off_policy, half_on_policy, repeated, fully_on_policy = run_distillation_cases(
        [distill_case, *[replace(distill_case, share=0.5)] * 2, replace(distill_case, share=1.0)]
    )
    assert half_on_policy.losses == repeated.losses and all(
        torch.equal(half_on_policy.tensors[name], repeated.tensors[name]) for name in half_on_policy.tensors
    )
    assert len({outcome.losses[1] for outcome in (off_policy, half_on_policy, fully_on_policy)}) == 3


@pytest.mark.multi
@pytest.mark.slow
def test_two_ranks_match_one_process(distill_case: DistillCase) -> None:
    shard, tensor, context = ParallelConfig(), ParallelConfig(tp=2), ParallelConfig(cp=2)
    unsplit = replace(distill_case, micro_batch=4)
    cases = {
        "shard": replace(distill_case, parallel=shard),
        "shard, packed": replace(unsplit, parallel=shard, packed=True, loss=ReverseKL()),
        "shard, top": replace(unsplit, parallel=shard, top=9),
        "shard, lora": replace(unsplit, parallel=shard, adapter=LoRAConfig(4, 8.0), weights=NF4Config()),
        "shard, own answers": replace(unsplit, parallel=shard, share=0.6),
        "tensor": replace(distill_case, parallel=tensor),
        "tensor, skewed": replace(unsplit, parallel=tensor, loss=SkewedKL(kd_ratio=0.7)),
        "tensor, top": replace(unsplit, parallel=tensor, top=9, loss=ForwardKL(kd_ratio=0.9)),
        "tensor, own answers": replace(unsplit, parallel=tensor, share=0.6),
        "context": replace(unsplit, parallel=context),
        "context, top": replace(unsplit, parallel=context, packed=True, top=9),
        "context, own answers": replace(unsplit, parallel=context, share=0.6),
    }
    expected = run_distillation_cases([replace(case, parallel=ParallelConfig()) for case in cases.values()])
    for actual in run_ranks(2, run_distillation_cases, [*cases.values()], limit=400):
        check_outcomes(actual, expected, cases)
