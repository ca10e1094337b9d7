"""Detection of NaN, Inf and spikes, and the limit of interventions."""

import math

import pytest
import torch
from torch import Tensor

from tests.parallel.ranks import run_ranks
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError
from tunekit.memory.config import MemoryConfig
from tunekit.training.step_guard import StepGuard, StepGuardConfig, format_rows

CPU, META = torch.device("cpu"), torch.device("meta")


def run_guard(guard: StepGuard, losses: list[float], norms: list[float] | None = None) -> list[bool]:
    """Which steps may update weights. Faults are cleared after each step."""
    accepted = []
    for _, loss, norm in zip(guard.over(0, len(losses)), losses, norms or [1.0] * len(losses), strict=True):
        accepted.append(guard.allows(torch.tensor(loss), torch.tensor(norm)))
        guard.fault = None
    return accepted


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("metric", ["loss", "norm"])
def test_non_finite_value_is_a_fault(bad: float, metric: str) -> None:
    guard = StepGuard(StepGuardConfig(), CPU)
    step = next(guard.over(6, 9))
    values = {"loss": torch.tensor(1.0), "norm": torch.tensor(1.0)} | {metric: torch.tensor(bad)}
    assert not guard.allows(values["loss"], values["norm"])
    assert guard.fault is not None
    assert (guard.fault.step, guard.fault.answer, step) == (6, "stop", 6)
    assert str(bad) in guard.fault.told(["a.jsonl:1"], "hint")
    assert StepGuard(StepGuardConfig("ignore"), CPU).allows(values["loss"], values["norm"])


class CountingTensor(Tensor):
    """Counts host reads."""

    reads = 0

    def tolist(self):
        CountingTensor.reads += 1
        return super().tolist()


def test_device_is_read_only_when_polled() -> None:
    CountingTensor.reads = 0
    guard = StepGuard(StepGuardConfig(), META)
    for step in guard.over(0, 5):
        loss = torch.tensor(math.nan if step >= 2 else 1.0).as_subclass(CountingTensor)
        assert guard.allows(loss, torch.tensor(1.0))
    assert CountingTensor.reads == 0
    guard.look(lag=3)
    assert CountingTensor.reads == 2 and guard.fault is None, "the last 3 steps are not read yet"
    guard.look()
    assert CountingTensor.reads == 5
    assert guard.fault is not None
    assert guard.fault.step == 2, "the first fault is reported"
    for config in (StepGuardConfig("skip"), StepGuardConfig(spike_factor=3.0)):
        assert not StepGuard(config, META).allows(torch.tensor(math.nan), torch.tensor(1.0))


def test_spike_is_relative_to_the_median_of_accepted_steps() -> None:
    config = StepGuardConfig(spike_factor=3.0, spike_window=8, max_interventions=9)
    norms = [1.0, 5.0] * 2 + [1.0] * 4 + [2.9, 3.1, 1.0, 30.0, 1.0]
    assert run_guard(StepGuard(config, CPU), [1.0] * len(norms), norms) == [True] * 9 + [False, True, False, True]
    growing = [1.5**n for n in range(40)]  # the median follows accepted steps
    assert all(run_guard(StepGuard(StepGuardConfig(spike_factor=20.0, spike_window=8), CPU), [1.0] * 40, growing))
    assert all(
        run_guard(
            StepGuard(StepGuardConfig(spike_factor=3.0, spike_window=8, spike_metric="loss"), CPU),
            [1.0] * 10,
            [1.0] * 9 + [99.0],
        )
    )
    assert not all(
        run_guard(
            StepGuard(StepGuardConfig(spike_factor=3.0, spike_window=8, spike_metric="loss"), CPU), [1.0] * 9 + [4.0]
        )
    )


def test_guard_stops_after_max_interventions() -> None:
    guard, actions = StepGuard(StepGuardConfig("skip", max_interventions=2), CPU), []
    for step in guard.over(0, 9):
        guard.allows(torch.tensor(1.0 if step in (0, 2) else math.nan), torch.tensor(1.0))
        actions.append(guard.fault and guard.fault.answer)
        guard.fault = None
    assert actions == [None, "skip", None, "skip", "skip", *["stop"] * 4]


def test_rollback_skips_data_and_is_saved_in_the_state() -> None:
    guard = StepGuard(StepGuardConfig(spike_factor=3.0, spike_window=8, on_spike="rollback"), CPU)
    state, steps = guard.state_dict(), []

    def restore() -> int:
        guard.load_state_dict(state)
        return 8

    for step in guard.over(0, 12):
        steps.append((step, guard.data(step)))
        if step == 8 and not guard.passed:
            state = guard.state_dict()
        if not guard.allows(torch.tensor(1.0), torch.tensor(9.0 if guard.data(step) in (9, 11) else 1.0)):
            assert guard.go_back(restore) == 8
    before, after_first_rollback, after_second_rollback = steps[:10], steps[10:12], steps[12:]
    assert before == [(n, n) for n in range(10)]
    assert after_first_rollback == [(8, 10), (9, 11)]
    assert after_second_rollback == [(8, 12), (9, 13), (10, 14), (11, 15)]
    restored = StepGuard(guard.rule, CPU)
    restored.load_state_dict(guard.state_dict())
    assert (restored.passed, restored.times, restored.last) == (4, 2, guard.last)


def test_rows_are_grouped_by_file() -> None:
    assert format_rows(["a.jsonl:3", "a.jsonl:17", "b train row 4", "c"]) == "a.jsonl:3, 17, b train row 4, c"
    assert format_rows([f"a.jsonl:{n}" for n in range(1, 41)]).endswith(", 15, 16 and 24 more")


def test_invalid_values_and_combinations_are_refused() -> None:
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


def run_worker_steps() -> tuple[list[float], list[str]]:
    """Weight after each step, and the actions of the guard. In the second step only rank 1 has a NaN."""
    weight, weights, actions = torch.nn.Parameter(torch.ones(1)), [], []
    with DistributedContext(0, "cpu") as dist:
        guard = StepGuard(StepGuardConfig("skip"), dist.device)
        update = MemoryConfig().update(torch.optim.SGD([weight], 0.5), 1.0, dist, guard.allows)
        for step in guard.over(0, 3):
            scale = math.nan if step == 1 and dist.rank == 1 else 1.0
            loss = (weight * scale).sum()
            loss.backward()
            update(dist.sum(loss.detach()))
            actions += [guard.fault.answer] if guard.fault else []
            guard.fault = None
            weights.append(float(weight))
    return weights, actions


@pytest.mark.multi
@pytest.mark.slow
def test_all_ranks_skip_a_step_with_nan_on_one_rank() -> None:
    rank0, rank1 = run_ranks(2, run_worker_steps)
    assert rank0 == rank1
    first, second, third = rank0[0]
    assert 1 > first == second > third
    assert rank0[1] == ["skip"]
