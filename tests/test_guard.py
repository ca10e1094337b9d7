"""The rule alone: what is no number, what is a spike, and how often."""

import math

import pytest
import torch
from torch import Tensor

from tests.parallel.ranks import on
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError
from tunekit.memory.config import MemoryConfig
from tunekit.training.step_guard import StepGuard, StepGuardConfig, format_rows

CPU, FAR = torch.device("cpu"), torch.device("meta")


def seen(watch: StepGuard, losses: list[float], norms: list[float] | None = None) -> list[bool]:
    """Which steps may move weights; what is wrong with one is taken note of."""
    found = []
    for _, loss, norm in zip(watch.over(0, len(losses)), losses, norms or [1.0] * len(losses), strict=True):
        found.append(watch.allows(torch.tensor(loss), torch.tensor(norm)))
        watch.fault = None
    return found


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["loss", "norm"])
def test_what_is_no_number_is_told(bad: float, where: str) -> None:
    watch = StepGuard(StepGuardConfig(), CPU)
    step = next(watch.over(6, 9))
    numbers = {"loss": torch.tensor(1.0), "norm": torch.tensor(1.0)} | {where: torch.tensor(bad)}
    assert not watch.allows(numbers["loss"], numbers["norm"])
    assert watch.fault is not None
    assert (watch.fault.step, watch.fault.answer, step) == (6, "stop", 6)
    assert str(bad) in watch.fault.told(["a.jsonl:1"], "mend")
    assert StepGuard(StepGuardConfig("ignore"), CPU).allows(numbers["loss"], numbers["norm"])


class Watched(Tensor):
    """Counts how often it is read."""

    reads = 0

    def tolist(self):
        Watched.reads += 1
        return super().tolist()


def test_a_device_is_read_when_it_is_due_and_no_sooner() -> None:
    Watched.reads = 0
    watch = StepGuard(StepGuardConfig(), FAR)
    for step in watch.over(0, 5):
        loss = torch.tensor(math.nan if step >= 2 else 1.0).as_subclass(Watched)
        assert watch.allows(loss, torch.tensor(1.0))
    assert Watched.reads == 0
    watch.look(lag=3)
    assert Watched.reads == 2 and watch.fault is None, "of the last steps the device may still know more"
    watch.look()
    assert Watched.reads == 5
    assert watch.fault is not None
    assert watch.fault.step == 2, "the first one is told"
    for rule in (StepGuardConfig("skip"), StepGuardConfig(spike_factor=3.0)):
        assert not StepGuard(rule, FAR).allows(torch.tensor(math.nan), torch.tensor(1.0))


def test_a_spike_is_so_many_times_the_median_of_the_last_good_steps() -> None:
    rule = StepGuardConfig(spike_factor=3.0, spike_window=8, max_interventions=9)
    norms = [1.0, 5.0] * 2 + [1.0] * 4 + [2.9, 3.1, 1.0, 30.0, 1.0]
    assert seen(StepGuard(rule, CPU), [1.0] * len(norms), norms) == [True] * 9 + [False, True, False, True]
    growing = [1.5**n for n in range(40)]  # the median follows what is good
    assert all(seen(StepGuard(StepGuardConfig(spike_factor=20.0, spike_window=8), CPU), [1.0] * 40, growing))
    assert all(
        seen(
            StepGuard(StepGuardConfig(spike_factor=3.0, spike_window=8, spike_metric="loss"), CPU),
            [1.0] * 10,
            [1.0] * 9 + [99.0],
        )
    )
    assert not all(
        seen(StepGuard(StepGuardConfig(spike_factor=3.0, spike_window=8, spike_metric="loss"), CPU), [1.0] * 9 + [4.0])
    )


def test_steps_that_are_passed_over_come_to_an_end() -> None:
    watch, answers = StepGuard(StepGuardConfig("skip", max_interventions=2), CPU), []
    for step in watch.over(0, 9):
        watch.allows(torch.tensor(1.0 if step in (0, 2) else math.nan), torch.tensor(1.0))
        answers.append(watch.fault and watch.fault.answer)
        watch.fault = None
    assert answers == [None, "skip", None, "skip", "skip", *["stop"] * 4]


def test_a_way_back_leaves_rows_behind_and_is_remembered() -> None:
    watch = StepGuard(StepGuardConfig(spike_factor=3.0, spike_window=8, on_spike="rollback"), CPU)
    kept, read = watch.state_dict(), []

    def restore() -> int:
        watch.load_state_dict(kept)
        return 8

    for step in watch.over(0, 12):
        read.append((step, watch.data(step)))
        if step == 8 and not watch.passed:
            kept = watch.state_dict()
        if not watch.allows(torch.tensor(1.0), torch.tensor(9.0 if watch.data(step) in (9, 11) else 1.0)):
            assert watch.go_back(restore) == 8
    first, second, third = read[:10], read[10:12], read[12:]
    assert first == [(n, n) for n in range(10)]
    assert second == [(8, 10), (9, 11)]
    assert third == [(8, 12), (9, 13), (10, 14), (11, 15)]
    other = StepGuard(watch.rule, CPU)
    other.load_state_dict(watch.state_dict())
    assert (other.passed, other.times, other.last) == (4, 2, watch.last)


def test_rows_are_named_by_their_files() -> None:
    assert format_rows(["a.jsonl:3", "a.jsonl:17", "b train row 4", "c"]) == "a.jsonl:3, 17, b train row 4, c"
    assert format_rows([f"a.jsonl:{n}" for n in range(1, 41)]).endswith(", 15, 16 and 24 more")


def test_what_makes_no_sense_is_refused() -> None:
    for field, value in (
        ("spike_factor", 1.0),
        ("spike_factor", math.nan),
        ("spike_window", 7),
        ("max_interventions", 0),
    ):
        with pytest.raises(FieldError, match=field):
            StepGuardConfig(**{field: value})
    assert StepGuardConfig("skip").refusal(early=True)
    assert StepGuardConfig(spike_factor=2.0).refusal(early=True)
    assert not StepGuardConfig().refusal(early=True)
    assert not StepGuardConfig("skip").refusal(early=False)


def steps_of_a_rank() -> tuple[list[float], list[str]]:
    """What a weight is after each step, and what was answered: in the second one rank 1 alone has a NaN."""
    weight, found, answers = torch.nn.Parameter(torch.ones(1)), [], []
    with DistributedContext(0, "cpu") as run:
        watch = StepGuard(StepGuardConfig("skip"), run.device)
        update = MemoryConfig().update(torch.optim.SGD([weight], 0.5), 1.0, run, watch.allows)
        for step in watch.over(0, 3):
            scale = math.nan if step == 1 and run.rank == 1 else 1.0
            loss = (weight * scale).sum()
            loss.backward()
            update(run.sum(loss.detach()))
            answers += [watch.fault.answer] if watch.fault else []
            watch.fault = None
            found.append(float(weight))
    return found, answers


@pytest.mark.multi
@pytest.mark.slow
def test_all_ranks_pass_a_step_over_that_one_of_them_cannot_take() -> None:
    one, other = on(2, steps_of_a_rank)
    assert one == other
    first, second, third = one[0]
    assert 1 > first == second > third
    assert one[1] == ["skip"]
