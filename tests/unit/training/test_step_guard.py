"""Detection of NaN, Inf and spikes, and the limit of interventions."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.ranks import run_ranks
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError
from tunekit.memory.config import MemoryConfig
from tunekit.training.step_guard import StepGuard, StepGuardConfig, format_rows

FINITE = torch.tensor(1.0)


def make_guard(config: StepGuardConfig, device: str = "cpu") -> StepGuard:
    dist = DistributedContext.single_process()
    dist.device = torch.device(device)
    return StepGuard(config, dist)


def run_guard(guard: StepGuard, losses: list[float], norms: list[float] | None = None) -> list[bool]:
    """Which steps may update weights. Anomalies are cleared after each step."""
    accepted = []
    for step, (loss, norm) in enumerate(zip(losses, norms or [1.0] * len(losses), strict=True)):
        accepted.append(guard.accepts(step, torch.tensor(loss), torch.tensor(norm)))
        guard.anomaly = None
    return accepted


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("metric", ["loss", "norm"])
def test_non_finite_value_is_an_anomaly(bad: float, metric: str) -> None:
    guard = make_guard(StepGuardConfig())
    values = {"loss": FINITE, "norm": FINITE} | {metric: torch.tensor(bad)}
    assert not guard.accepts(6, values["loss"], values["norm"])
    assert guard.anomaly is not None
    assert (guard.anomaly.step, guard.anomaly.action) == (6, "stop")
    message = guard.anomaly.message(["a.jsonl:1"], "hint")
    assert "step 7" in message and str(bad) in message and "a.jsonl:1" in message
    assert make_guard(StepGuardConfig("ignore")).accepts(0, values["loss"], values["norm"])


class CountingTensor(Tensor):
    """Counts host reads."""

    reads = 0

    def tolist(self):
        CountingTensor.reads += 1
        return super().tolist()


def test_device_is_read_only_when_polled() -> None:
    CountingTensor.reads = 0
    guard = make_guard(StepGuardConfig(), "meta")
    for step in range(5):
        loss = torch.tensor(math.nan if step >= 2 else 1.0).as_subclass(CountingTensor)
        assert guard.accepts(step, loss, FINITE)
    assert CountingTensor.reads == 0
    guard.read(lag=3)
    assert CountingTensor.reads == 2 and guard.anomaly is None, "the last 3 steps are not read yet"
    guard.read()
    assert CountingTensor.reads == 5
    assert guard.anomaly is not None
    assert guard.anomaly.step == 2, "the first anomaly is reported"
    for config in (StepGuardConfig("skip"), StepGuardConfig(spike_factor=3.0)):
        assert not make_guard(config, "meta").accepts(0, torch.tensor(math.nan), FINITE)


def test_spike_is_relative_to_the_median_of_accepted_steps() -> None:
    config = StepGuardConfig(spike_factor=3.0, spike_window=8, max_interventions=9)
    norms = [1.0, 2.9] * 2 + [1.0] * 4 + [2.9, 3.1, 1.0, 30.0, 1.0]
    assert run_guard(make_guard(config), [1.0] * len(norms), norms) == [True] * 9 + [False, True, False, True]
    growing = [1.5**n for n in range(40)]  # the median follows accepted steps
    assert all(run_guard(make_guard(StepGuardConfig(spike_factor=20.0, spike_window=8)), [1.0] * 40, growing))
    assert all(
        run_guard(
            make_guard(StepGuardConfig(spike_factor=3.0, spike_window=8, spike_metric="loss")),
            [1.0] * 10,
            [1.0] * 9 + [99.0],
        )
    )
    assert not all(
        run_guard(make_guard(StepGuardConfig(spike_factor=3.0, spike_window=8, spike_metric="loss")), [1.0] * 9 + [4.0])
    )


def test_spike_among_the_first_steps_is_relative_to_their_maximum() -> None:
    config = StepGuardConfig(spike_factor=3.0, spike_metric="loss")
    assert run_guard(make_guard(config), [7.8, 636.0, 6782.0, 8.0, 23.0]) == [True, False, False, True, True]


def test_divergence_is_logged_once(capsys: pytest.CaptureFixture[str]) -> None:
    for losses, count in (([5.0] * 8 + [30.0] * 20, 1), ([1.0] + [2.0] * 20, 0), ([0.1] * 9 + [50.0] + [0.1] * 9, 0)):
        guard = make_guard(StepGuardConfig())
        for step, loss in enumerate(losses):
            guard.accepts(step, torch.tensor(loss), FINITE)
            guard.warn_of_divergence()
        assert capsys.readouterr().err.count("diverged") == count
        restored = make_guard(StepGuardConfig())
        restored.load_state_dict(guard.state_dict())
        assert restored.state_dict() == guard.state_dict()


def test_guard_stops_after_max_interventions() -> None:
    guard, actions = make_guard(StepGuardConfig("skip", max_interventions=2)), []
    for step in range(9):
        guard.accepts(step, torch.tensor(1.0 if step in (0, 2) else math.nan), FINITE)
        actions.append(guard.anomaly and guard.anomaly.action)
        guard.anomaly = None
    assert actions == [None, "skip", None, "skip", "skip", *["stop"] * 4]


class Checkpoints:
    """Training states and data loader of a guard, as far as it uses them."""

    def __init__(self, guard: StepGuard) -> None:
        self.guard, self.state, self.step = guard, guard.state_dict(), 0
        self.data, self.num_steps = self, 12

    def restore(self) -> int:
        self.guard.load_state_dict(self.state)
        return self.step

    def row_locations(self, step: int) -> list[str]:
        return [f"a.jsonl:{step + 1}"]

    def start(self, start: int, end: int) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def rewind(self, step: int) -> None: ...


def test_rollback_skips_data_and_is_saved_in_the_state() -> None:
    guard = make_guard(StepGuardConfig(spike_factor=3.0, spike_window=8, on_spike="rollback"))
    fake: Any = Checkpoints(guard)
    guard.prefetcher = fake
    step, steps = 0, []
    while step < 12:
        steps.append((step, guard.data_step(step)))
        if step == 8 and not guard.skipped_data:
            fake.step, fake.state = 8, guard.state_dict()
        if not guard.accepts(step, FINITE, torch.tensor(9.0 if guard.data_step(step) in (9, 11) else 1.0)):
            step = guard.roll_back(fake, fake)
            assert step == 8
            continue
        step += 1
    before, after_first_rollback, after_second_rollback = steps[:10], steps[10:12], steps[12:]
    assert before == [(n, n) for n in range(10)]
    assert after_first_rollback == [(8, 10), (9, 11)]
    assert after_second_rollback == [(8, 12), (9, 13), (10, 14), (11, 15)]
    restored = make_guard(guard.config)
    restored.load_state_dict(guard.state_dict())
    assert (restored.skipped_data, restored.num_rollbacks, restored.values) == (4, 2, guard.values)


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
    for config in (StepGuardConfig("skip"), StepGuardConfig(spike_factor=2.0)):
        config.check_optimizer(optimizer_in_bwd=False)
        with pytest.raises(FieldError):
            config.check_optimizer(optimizer_in_bwd=True)
    StepGuardConfig().check_optimizer(optimizer_in_bwd=True)


def run_worker_steps() -> tuple[list[float], list[str]]:
    """Weight after each step, and the actions of the guard. In the second step only rank 1 has a NaN."""
    weight, weights, actions = torch.nn.Parameter(torch.ones(1)), [], []
    with DistributedContext(0, "cpu") as dist:
        guard = StepGuard(StepGuardConfig("skip"), dist)
        optimizer = MemoryConfig().wrap_optimizer(torch.optim.SGD([weight], 0.5), dist)
        for step in range(3):
            scale = math.nan if step == 1 and dist.rank == 1 else 1.0
            loss = (weight * scale).sum()
            loss.backward()
            if not guard.accepts(step, dist.all_reduce_sum(loss.detach()), optimizer.clip_grad_norm(1.0)):
                optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
            actions += [guard.anomaly.action] if guard.anomaly else []
            guard.anomaly = None
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
