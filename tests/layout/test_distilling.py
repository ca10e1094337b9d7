"""Distillation on any layout gives the numbers of one process: the same rows, the same answers of the student's own."""

from dataclasses import replace

import pytest
import torch

from tests.checkpoints import build, save
from tests.layout.compared import DENSE, PROPORTIONAL, differences
from tests.layout.distilling import Lesson, lessons
from tests.parallel.ranks import on
from tunekit.adapters.config import LoRAConfig
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.losses.kl_divergence import ForwardKL, ReverseKL, SkewedKL
from tunekit.quantization.config import NF4Config


@pytest.fixture(scope="module")
def lesson(tmp_path_factory: pytest.TempPathFactory) -> Lesson:
    """A student, and a teacher that is deeper and padded to more ids."""
    root = tmp_path_factory.mktemp("models")
    student = save(build(DENSE), root / "student")
    teacher = save(build(DENSE | {"num_hidden_layers": 3, "vocab_size": 99}, seed=1), root / "teacher")
    return Lesson(student, teacher=teacher, optimizer=PROPORTIONAL, steps=2)


def agree(found: list, wanted: list, cases: dict[str, Lesson], limit: float = 1e-5) -> None:
    far = {name: max(differences(a, b)) for name, a, b in zip(cases, found, wanted, strict=True)}
    assert max(far.values()) < limit, far


def test_micro_batches_change_nothing(lesson: Lesson) -> None:
    for case in (lesson, replace(lesson, packed=True, top=7), replace(lesson, share=0.6)):
        cases = {"one": case, "two": replace(case, micro_batch=2), "all": replace(case, micro_batch=4)}
        one, *others = lessons([*cases.values()])
        agree([one, one, *others][1:], [one] * len(cases), cases)


def test_rows_that_the_student_writes_are_others(lesson: Lesson) -> None:
    """And depend on the seed and the step alone."""
    plain, one, again, all_of = lessons([lesson, *[replace(lesson, share=0.5)] * 2, replace(lesson, share=1.0)])
    assert one.losses == again.losses and all(
        torch.equal(one.tensors[name], again.tensors[name]) for name in one.tensors
    )
    assert len({outcome.losses[1] for outcome in (plain, one, all_of)}) == 3


@pytest.mark.multi
@pytest.mark.slow
def test_two_ranks(lesson: Lesson) -> None:
    shard, tensor, context = ParallelConfig(), ParallelConfig(tp=2), ParallelConfig(cp=2)
    cases = {
        "shard": replace(lesson, parallel=shard),
        "shard, packed": replace(lesson, parallel=shard, packed=True, micro_batch=2, loss=ReverseKL()),
        "shard, top": replace(lesson, parallel=shard, top=9),
        "shard, lora": replace(lesson, parallel=shard, adapter=LoRAConfig(4, 8.0), weights=NF4Config()),
        "shard, own answers": replace(lesson, parallel=shard, share=0.6),
        "tensor": replace(lesson, parallel=tensor),
        "tensor, skewed": replace(lesson, parallel=tensor, loss=SkewedKL(kd_ratio=0.7)),
        "tensor, top": replace(lesson, parallel=tensor, top=9, loss=ForwardKL(kd_ratio=0.9)),
        "tensor, own answers": replace(lesson, parallel=tensor, share=0.6),
        "context": replace(lesson, parallel=context),
        "context, top": replace(lesson, parallel=context, packed=True, top=9),
        "context, own answers": replace(lesson, parallel=context, share=0.6),
    }
    wanted = lessons([replace(case, parallel=ParallelConfig()) for case in cases.values()])
    for found in on(2, lessons, [*cases.values()], limit=400):
        agree(found, wanted, cases)
