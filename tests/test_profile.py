"""What a trace says of the time of steps, from traces whose answer is known, and of two ranks at work."""

import gzip
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.ranks import on
from tunekit.config.errors import FieldErrors
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError, UserError
from tunekit.loggers import metric_logger
from tunekit.training import profiler as profile
from tunekit.training.profiler import (
    FOLDER,
    TABLE,
    Profiler,
    ProfilerConfig,
    RankProfile,
    record_data_wait,
    table,
    verdict,
)
from tunekit.training.trace_analysis import StepTimeBreakdown, both, length, minus, outermost, step_breakdown, union


def event(name: str, start: float, end: float, cat: str = "cpu_op", tid: int = 1, **args: Any) -> dict[str, Any]:
    """In milliseconds, as a trace has it in microseconds."""
    found = {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": 1e6 + start * 1e3}
    return found | {"dur": (end - start) * 1e3, "args": args}


def step(number: int, start: float, end: float) -> dict[str, Any]:
    return event(f"ProfilerStep#{number}", start, end, "user_annotation")


def shares(found: StepTimeBreakdown) -> list[float]:
    """Milliseconds: compute, optimizer, exposed, data, other, hidden."""
    names = ("compute", "optimizer", "exposed", "data", "other", "hidden")
    return [round(1e3 * vars(found)[name], 6) for name in names]


def test_spans_are_sets_of_moments() -> None:
    draw = torch.Generator().manual_seed(0)
    for _ in range(50):
        pairs = [torch.randint(0, 60, (8, 2), generator=draw).sort(1).values.tolist() for _ in range(2)]
        a, b = (union(map(tuple, one)) for one in pairs)
        there = [{m for start, end in one for m in range(start, end)} for one in pairs]
        for spans, moments in ((a, there[0]), (both(a, b), there[0] & there[1]), (minus(a, b), there[0] - there[1])):
            assert {m for start, end in spans for m in range(int(start), int(end))} == moments
            assert length(spans) == len(moments)
            assert all(one[1] <= other[0] for one, other in zip(spans, spans[1:], strict=False))


def on_a_cpu() -> list[dict[str, Any]]:
    """One step of 100 ms: 10 of data, a gather of 20 of which 5 are behind a product, a step of the optimizer."""
    return [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {}},
        step(4, 0, 100),
        event("aten::mm", -20, -10),  # before the step
        event("tunekit::data", 0, 10, "user_annotation"),
        event("aten::empty", 1, 2),  # what is computed meanwhile is no waiting
        event("autograd::engine::evaluate_function: MmBackward0", 10, 60),  # waits inside
        event("c10d::_allgather_base_", 10, 11, **{"Input Dims": [[64], [32], [], []]}),
        event("gloo:all_gather", 10, 30, "user_annotation", 2, **{"Input Dims": [[32]], "Input type": ["float"]}),
        event("aten::copy_", 12, 14, tid=2),  # in gloo's own thread
        event("aten::linear", 25, 45),
        event("aten::mm", 26, 44),
        event("c10d::_reduce_scatter_base_", 50, 51, **{"Input Dims": [[4], [8], [], [], []]}),
        event(
            "gloo:all_reduce", 50, 56, "user_annotation", 2, **{"Input Dims": [[8]], "Input type": ["c10::BFloat16"]}
        ),
        event("Optimizer.step#AdamW.step", 70, 90, "user_annotation"),
        event("aten::_fused_adamw_", 75, 85),
    ]


def test_shares_of_a_step_on_a_cpu() -> None:
    found = step_breakdown(on_a_cpu())
    assert found.steps == 1
    assert found.total == pytest.approx(0.1)
    assert shares(found) == [21, 20, 15 + 6, 9, 29, 5]
    gather, reduce = found.exchanges
    assert (gather.kind, gather.calls, gather.bytes) == ("all-gather", 1, 64 * 4)
    assert gather.seconds == pytest.approx(0.02)
    assert (reduce.kind, reduce.calls, reduce.bytes) == ("reduce-scatter", 1, 8 * 2)
    assert [(one.name, one.calls) for one in found.operations[:2]] == [("aten::linear", 1), ("aten::_fused_adamw_", 1)]


def test_shares_of_two_steps_on_a_gpu() -> None:
    """Kernels and streams; calls on the host are no exchange, and what they wait for is none of their time."""
    told = {"Collective name": "_allgather_base", "In msg nelems": 50, "Out msg nelems": 100, "dtype": "BFloat16"}
    sums = {"Collective name": "allreduce", "In msg nelems": 10, "Out msg nelems": 10, "dtype": "Float"}
    found = step_breakdown(
        [
            step(1, 0, 50),
            step(2, 50, 100),
            event("ProfilerStep#1", 0, 60, "gpu_user_annotation", 7),
            event("tunekit::data", 0, 5, "user_annotation"),
            event("c10d::_allgather_base_", 6, 40, **{"Input Dims": [[100], [50]]}),
            event("aten::mm", 6, 30),
            event("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 10, 30, "kernel", 20, **told),
            event("sm90_xmma_gemm_bf16", 20, 45, "kernel", 7),
            event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)", 50, 60, "kernel", 20, **sums),
            event("ncclDevKernel_SendRecv(ncclDevKernelArgs)", 60, 61, "kernel", 20),
            event("gloo:all_reduce", 20, 25, "user_annotation", 3, **{"Input Dims": [[3]], "Input type": ["long int"]}),
            event("Optimizer.step#AdamW.step", 52, 54, "user_annotation"),
            event("Optimizer.step#AdamW.step", 70, 80, "gpu_user_annotation", 7),
            event("multi_tensor_apply_kernel", 70, 78, "kernel", 7),
            event("Memcpy HtoD", 85, 90, "gpu_memcpy", 7),
        ]
    )
    assert found.steps == 2
    assert shares(found) == [25 + 5, 8, 10 + 10 + 1, 5, 36, 10]
    assert {(e.kind, e.calls, e.bytes) for e in found.exchanges} == {
        ("all-gather", 1, 200),
        ("all-reduce", 2, 40 + 24),
        ("send", 1, 0),
    }


def test_a_trace_without_a_step_is_all_zero() -> None:
    for events in ([], [event("aten::mm", 0, 1)], [step(1, 0, 0)]):
        found = step_breakdown(events)
        assert found.total == 0
        assert not any(shares(found))
        assert table([RankProfile(found, 0)], 1) == "# No step was profiled\n"
    assert "the time between operations, 100%" in table([RankProfile(step_breakdown([step(1, 0, 1)]), 0)], 1)


def test_what_contains_others_counts_once() -> None:
    events = [event("a", 0, 10), event("b", 0, 4), event("c", 4, 10), event("d", 2, 3, tid=2), event("e", 10, 11)]
    assert [e["name"] for e in outermost(events)] == ["a", "d", "e"]


def made(**seconds: float) -> StepTimeBreakdown:
    zero = dict.fromkeys(("compute", "optimizer", "exposed", "data", "other", "hidden"), 0.0)
    exchanges = step_breakdown(on_a_cpu()).exchanges
    return StepTimeBreakdown(1, sum(seconds.values()), **zero | seconds, exchanges=exchanges, operations=())


@pytest.mark.parametrize(
    ("seconds", "says"),
    [
        ({"compute": 9, "other": 1}, "compute, 90%"),
        ({"compute": 5, "data": 4, "exposed": 1}, "data, 40%"),
        ({"compute": 5, "exposed": 5}, "exposed exchanges, 50% of a step. Weights come late"),
        ({"compute": 5, "other": 5}, "the time between operations, 50%"),
    ],
)
def test_the_bottleneck_is_named(seconds: dict[str, float], says: str) -> None:
    assert f"Bottleneck: {says}" in verdict([made(**seconds)])


def test_a_slow_rank_is_named() -> None:
    assert "The others wait for rank 1" in verdict([made(compute=2, exposed=8), made(compute=9, exposed=1)])


def looked(folder: Path, choice: ProfilerConfig | bool, steps: int, left: int | None = None) -> None:
    """Steps of products under a profile, left in the middle of one if wanted."""
    x = torch.rand(64, 64)
    with DistributedContext(0, "cpu") as run, Profiler(choice, folder, run) as profiler:
        for number in range(steps):
            profiler.at(number)
            with record_data_wait():
                y = x + number
            if number == left:
                raise KeyError
            run.sum(y @ x)
            run.totals(number)


@pytest.mark.parametrize(("steps", "first", "count"), [(9, 3, 2), (4, 3, 1), (5, 3, 2)])
def test_the_steps_that_were_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture, steps: int, first: int, count: int
) -> None:
    """Also where the run ends before they do."""
    looked(tmp_path, ProfilerConfig(skip_first=3, active=2), steps)
    with gzip.open(tmp_path / FOLDER / "rank-0.json.gz", "rt") as lines:
        events = json.load(lines)["traceEvents"]
    found = step_breakdown(events)
    assert found.steps == count
    assert 0 < found.compute + found.data <= found.total
    text = (tmp_path / FOLDER / TABLE).read_text()
    title = f"# Steps {first + 1} to {first + count}" if count > 1 else f"# Step {first + 1}"
    assert text.startswith(title + "\n")
    assert "`aten::matmul`" in text
    assert text in capsys.readouterr().err


def test_a_run_too_short_leaves_nothing_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for steps in (1, 2, 3):
        looked(tmp_path, True, steps)
        told = f"no step was profiled: profiler.skip_first=3 steps are skipped, and this start had {steps}\n"
        assert capsys.readouterr().err.endswith(told)
    looked(tmp_path, False, 9)
    assert not (tmp_path / FOLDER).exists()
    looked(tmp_path, True, 4)
    assert "no step was profiled" not in capsys.readouterr().err


def test_a_run_whose_steps_are_known_is_long_enough_or_not() -> None:
    """The first step that is looked at comes behind `start` others."""
    assert ProfilerConfig(skip_first=3).refusal(4) is None and ProfilerConfig(skip_first=3).refusal(None) is None
    assert "`max_steps` is 3" in (ProfilerConfig(skip_first=3).refusal(3) or "")


@pytest.mark.parametrize("left", [2, 3, 4])
def test_a_run_that_is_left_closes_its_profile(tmp_path: Path, left: int) -> None:
    with pytest.raises(KeyError):
        looked(tmp_path, ProfilerConfig(skip_first=3, active=3), 9, left)
    assert not (tmp_path / FOLDER / TABLE).exists()
    looked(tmp_path, ProfilerConfig(skip_first=1, active=1), 3)  # another may begin
    assert (tmp_path / FOLDER / TABLE).exists()


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    for name in ("skip_first", "active"):
        with pytest.raises(FieldError, match="1 or more"):
            ProfilerConfig(**{name: 0})
    with pytest.raises(FieldErrors) as caught:
        ProfilerConfig(skip_first=0, active=-1)
    assert [one.field for one in caught.value.errors] == ["skip_first", "active"]
    with pytest.raises(UserError, match="profiler.profile_memory"):
        Profiler(ProfilerConfig(profile_memory=True), tmp_path, DistributedContext(0, "cpu"))
    (tmp_path / FOLDER).write_text("in the way")
    with pytest.raises(UserError, match="cannot write"):
        looked(tmp_path, ProfilerConfig(skip_first=1, active=1), 3)


def at_work(folder: str) -> list[float]:
    """On one of two ranks: a profile, the most of both, and a line of metrics."""
    torch.set_num_threads(1)
    looked(Path(folder), ProfilerConfig(skip_first=1, active=2), 4)
    with DistributedContext(0, "cpu") as run:
        most = run.most(run.rank, -run.rank, math.pi)
        with metric_logger.MetricLogger(Path(folder), run, total=1) as meter:
            meter.step(1, {"loss": 1.0, "grad_norm": 1.0, "lr": 1.0}, tokens=7, learnt=5, wait=0.25 + run.rank)
    return most


@pytest.mark.multi
@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    assert on(2, at_work, str(tmp_path)) == [[1, 0, math.pi]] * 2
    for rank in range(2):
        with gzip.open(tmp_path / FOLDER / f"rank-{rank}.json.gz", "rt") as lines:
            found = step_breakdown(json.load(lines)["traceEvents"])
        (sums,) = found.exchanges
        assert (found.steps, sums.kind, sums.calls) == (2, "all-reduce", 4)
        assert sums.bytes == 2 * (64 * 64 * 4 + 3 * 8)
        assert found.exposed > 0
    text = (tmp_path / FOLDER / TABLE).read_text()
    assert len(re.findall(r"^\| [01] \|", text, re.MULTILINE)) == 2
    assert "| all-reduce | 2 |" in text
    (line,) = metric_logger.read_metrics(tmp_path)
    assert (line["data_time"], line["num_tokens"]) == (1.25, 7)


def test_the_names_that_are_looked_for_are_those_of_torch(tmp_path: Path) -> None:
    """An optimizer's own range, and steps: both are made by torch."""
    weight = torch.nn.Parameter(torch.rand(64, 64))
    optimizer = torch.optim.AdamW([weight])
    with DistributedContext(0, "cpu") as run, Profiler(ProfilerConfig(1, 1), tmp_path, run) as profiler:
        for number in range(3):
            profiler.at(number)
            weight.sum().backward()
            optimizer.step()
    with gzip.open(tmp_path / FOLDER / "rank-0.json.gz", "rt") as lines:
        assert step_breakdown(json.load(lines)["traceEvents"]).optimizer > 0
    assert profile.peak(torch.device("cpu")) > 2**20
