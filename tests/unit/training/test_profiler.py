"""Step time breakdown of traces with known results, and a profile of two ranks."""

import gzip
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import record_function

from tests.helpers.ranks import run_ranks
from tunekit.config.errors import FieldErrors
from tunekit.data.dataloader.prefetch import DATA_WAIT
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.signals import STOP_SIGNALS
from tunekit.errors import FieldError, UserError
from tunekit.loggers import metric_logger, metrics_file
from tunekit.training import profiler as profile
from tunekit.training.profiler import (
    DIRECTORY,
    TABLE,
    Profiler,
    ProfilerConfig,
    RankProfile,
    find_bottleneck,
    format_table,
)
from tunekit.training.trace_analysis import (
    StepTimeBreakdown,
    intersect,
    outermost,
    step_breakdown,
    subtract,
    total_length,
    union,
)


def make_event(name: str, start: float, end: float, cat: str = "cpu_op", tid: int = 1, **args: Any) -> dict[str, Any]:
    """Trace event. Arguments are in milliseconds, the trace is in microseconds."""
    event = {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": 1e6 + start * 1e3}
    return event | {"dur": (end - start) * 1e3, "args": args}


def make_step(number: int, start: float, end: float) -> dict[str, Any]:
    return make_event(f"ProfilerStep#{number}", start, end, "user_annotation")


def milliseconds(breakdown: StepTimeBreakdown) -> list[float]:
    """Milliseconds of compute, optimizer, exposed and data time, other time, and hidden communication."""
    names = ("compute", "optimizer", "exposed", "data", "other", "hidden")
    return [round(1e3 * vars(breakdown)[name], 6) for name in names]


def test_span_operations_are_set_operations() -> None:
    draw = torch.Generator().manual_seed(0)
    for _ in range(50):
        pairs = [torch.randint(0, 60, (8, 2), generator=draw).sort(1).values.tolist() for _ in range(2)]
        a, b = (union(map(tuple, spans_of_pair)) for spans_of_pair in pairs)
        moment_sets = [{m for start, end in spans_of_pair for m in range(start, end)} for spans_of_pair in pairs]
        for spans, moments in (
            (a, moment_sets[0]),
            (intersect(a, b), moment_sets[0] & moment_sets[1]),
            (subtract(a, b), moment_sets[0] - moment_sets[1]),
        ):
            assert {m for start, end in spans for m in range(int(start), int(end))} == moments
            assert total_length(spans) == len(moments)
            assert all(first[1] <= second[0] for first, second in zip(spans, spans[1:], strict=False))


def cpu_trace() -> list[dict[str, Any]]:
    """One step of 100 ms: 10 ms of data, an all-gather of 20 ms (5 ms overlap with compute), an optimizer step."""
    return [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {}},
        make_step(4, 0, 100),
        make_event("aten::mm", -20, -10),  # before the step
        make_event("tunekit::data", 0, 10, "user_annotation"),
        make_event("aten::empty", 1, 2),  # compute during data loading is not data time
        make_event("autograd::engine::evaluate_function: MmBackward0", 10, 60),  # waits inside
        make_event("c10d::_allgather_base_", 10, 11, **{"Input Dims": [[64], [32], [], []]}),
        make_event("gloo:all_gather", 10, 30, "user_annotation", 2, **{"Input Dims": [[32]], "Input type": ["float"]}),
        make_event("aten::copy_", 12, 14, tid=2),  # in a thread of gloo
        make_event("aten::linear", 25, 45),
        make_event("aten::mm", 26, 44),
        make_event("c10d::_reduce_scatter_base_", 50, 51, **{"Input Dims": [[4], [8], [], [], []]}),
        make_event(
            "gloo:all_reduce", 50, 56, "user_annotation", 2, **{"Input Dims": [[8]], "Input type": ["c10::BFloat16"]}
        ),
        make_event("Optimizer.step#AdamW.step", 70, 90, "user_annotation"),
        make_event("aten::_fused_adamw_", 75, 85),
    ]


def test_breakdown_of_a_cpu_step() -> None:
    breakdown = step_breakdown(cpu_trace())
    assert breakdown.steps == 1
    assert breakdown.total == pytest.approx(0.1)
    assert milliseconds(breakdown) == [21, 20, 15 + 6, 9, 29, 5]
    gather, reduce = breakdown.collectives
    assert (gather.name, gather.calls, gather.bytes) == ("all-gather", 1, 64 * 4)
    assert gather.seconds == pytest.approx(0.02)
    assert (reduce.name, reduce.calls, reduce.bytes) == ("reduce-scatter", 1, 8 * 2)
    assert [(op.name, op.calls) for op in breakdown.ops[:2]] == [("aten::linear", 1), ("aten::_fused_adamw_", 1)]


def test_breakdown_of_two_gpu_steps() -> None:
    """Communication kernels on their own stream; calls on the host do not count as communication."""
    gather_args = {
        "Collective name": "_allgather_base",
        "In msg nelems": 50,
        "Out msg nelems": 100,
        "dtype": "BFloat16",
    }
    reduce_args = {"Collective name": "allreduce", "In msg nelems": 10, "Out msg nelems": 10, "dtype": "Float"}
    breakdown = step_breakdown(
        [
            make_step(1, 0, 50),
            make_step(2, 50, 100),
            make_event("ProfilerStep#1", 0, 60, "gpu_user_annotation", 7),
            make_event("tunekit::data", 0, 5, "user_annotation"),
            make_event("c10d::_allgather_base_", 6, 40, **{"Input Dims": [[100], [50]]}),
            make_event("aten::mm", 6, 30),
            make_event(
                "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 10, 30, "kernel", 20, **gather_args
            ),
            make_event("sm90_xmma_gemm_bf16", 20, 45, "kernel", 7),
            make_event(
                "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)", 50, 60, "kernel", 20, **reduce_args
            ),
            make_event("ncclDevKernel_SendRecv(ncclDevKernelArgs)", 60, 61, "kernel", 20),
            make_event(
                "gloo:all_reduce", 20, 25, "user_annotation", 3, **{"Input Dims": [[3]], "Input type": ["long int"]}
            ),
            make_event("Optimizer.step#AdamW.step", 52, 54, "user_annotation"),
            make_event("Optimizer.step#AdamW.step", 70, 80, "gpu_user_annotation", 7),
            make_event("multi_tensor_apply_kernel", 70, 78, "kernel", 7),
            make_event("Memcpy HtoD", 85, 90, "gpu_memcpy", 7),
        ]
    )
    assert breakdown.steps == 2
    assert milliseconds(breakdown) == [25 + 5, 8, 10 + 10 + 1, 5, 36, 10]
    assert {(e.name, e.calls, e.bytes) for e in breakdown.collectives} == {
        ("all-gather", 1, 200),
        ("all-reduce", 2, 40 + 24),
        ("send", 1, 0),
    }


def test_trace_without_steps_is_zero() -> None:
    for events in ([], [make_event("aten::mm", 0, 1)], [make_step(1, 0, 0)]):
        breakdown = step_breakdown(events)
        assert breakdown.total == 0
        assert not any(milliseconds(breakdown))
        assert format_table([RankProfile(breakdown, 0)], 1) == "# No step was profiled\n"
    assert "time between operators, 100%" in format_table([RankProfile(step_breakdown([make_step(1, 0, 1)]), 0)], 1)


def test_only_outermost_events_count() -> None:
    events = [
        make_event("a", 0, 10),
        make_event("b", 0, 4),
        make_event("c", 4, 10),
        make_event("d", 2, 3, tid=2),
        make_event("e", 10, 11),
    ]
    assert [e["name"] for e in outermost(events)] == ["a", "d", "e"]


def make_breakdown(**seconds: float) -> StepTimeBreakdown:
    zero = dict.fromkeys(("compute", "optimizer", "exposed", "data", "other", "hidden"), 0.0)
    collectives = step_breakdown(cpu_trace()).collectives
    return StepTimeBreakdown(1, sum(seconds.values()), **zero | seconds, collectives=collectives, ops=())


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"compute": 9, "other": 1}, "compute, 90%"),
        ({"compute": 5, "data": 4, "exposed": 1}, "data loading, 40%"),
        ({"compute": 5, "exposed": 5}, "exposed communication, 50% of the step. Use a larger"),
        ({"compute": 5, "other": 5}, "time between operators, 50%"),
    ],
)
def test_bottleneck_is_named(seconds: dict[str, float], expected: str) -> None:
    assert f"Bottleneck: {expected}" in find_bottleneck([make_breakdown(**seconds)])


def test_slow_rank_is_named() -> None:
    assert "The other ranks wait for rank 1" in find_bottleneck(
        [make_breakdown(compute=2, exposed=8), make_breakdown(compute=9, exposed=1)]
    )


def run_profiled(folder: Path, config: ProfilerConfig | bool, steps: int, fail_at: int | None = None) -> None:
    """Profile steps of matmuls; raise KeyError in step `fail_at`."""
    x = torch.rand(64, 64)
    with DistributedContext(0, "cpu") as dist, Profiler(config, folder, dist) as profiler:
        for step in range(steps):
            profiler.begin_step(step)
            with record_function(DATA_WAIT):
                y = x + step
            if step == fail_at:
                raise KeyError
            dist.all_reduce_sum(y @ x)
            dist.sum_each_count(step)


@pytest.mark.parametrize(("steps", "first", "count"), [(9, 3, 2), (4, 3, 1), (5, 3, 2)])
def test_configured_steps_are_profiled(
    tmp_path: Path, capsys: pytest.CaptureFixture, steps: int, first: int, count: int
) -> None:
    """Also if the run ends before all configured steps are profiled."""
    run_profiled(tmp_path, ProfilerConfig(skip_first=3, active=2), steps)
    with gzip.open(tmp_path / DIRECTORY / "rank-0.json.gz", "rt") as lines:
        events = json.load(lines)["traceEvents"]
    breakdown = step_breakdown(events)
    assert breakdown.steps == count
    assert 0 < breakdown.compute + breakdown.data <= breakdown.total
    text = (tmp_path / DIRECTORY / TABLE).read_text()
    title = f"# Steps {first + 1} to {first + count}" if count > 1 else f"# Step {first + 1}"
    assert text.startswith(title + "\n")
    assert "`aten::matmul`" in text
    assert text in capsys.readouterr().err


def test_run_shorter_than_skip_first_writes_a_message_only(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for steps in (1, 2, 3):
        run_profiled(tmp_path, True, steps)
        expected = f"profiler.skip_first=3, and this process ran {steps} steps\n"
        assert capsys.readouterr().err.endswith(expected)
    run_profiled(tmp_path, False, 9)
    assert not (tmp_path / DIRECTORY).exists()
    run_profiled(tmp_path, True, 4)
    assert "no step was profiled" not in capsys.readouterr().err


def test_skip_first_beyond_max_steps_is_refused() -> None:
    """Skipped steps count from the first step of this process."""
    ProfilerConfig(skip_first=3).check_num_steps(4)
    ProfilerConfig(skip_first=3).check_num_steps(None)
    with pytest.raises(FieldError, match="max_steps=3"):
        ProfilerConfig(skip_first=3).check_num_steps(3)


@pytest.mark.parametrize("fail_at", [2, 3, 4])
def test_exception_closes_the_profiler(tmp_path: Path, fail_at: int) -> None:
    with pytest.raises(KeyError):
        run_profiled(tmp_path, ProfilerConfig(skip_first=3, active=3), 9, fail_at)
    assert not (tmp_path / DIRECTORY / TABLE).exists()
    run_profiled(tmp_path, ProfilerConfig(skip_first=1, active=1), 3)  # another profiler can start
    assert (tmp_path / DIRECTORY / TABLE).exists()


def test_invalid_values_and_unwritable_paths_are_refused(tmp_path: Path) -> None:
    for name in ("skip_first", "active"):
        with pytest.raises(FieldError, match=">= 1"):
            ProfilerConfig(**{name: 0})
    with pytest.raises(FieldErrors) as caught:
        ProfilerConfig(skip_first=0, active=-1)
    assert [error.field for error in caught.value.errors] == ["skip_first", "active"]
    with pytest.raises(UserError, match="profiler.profile_memory"):
        Profiler(ProfilerConfig(profile_memory=True), tmp_path, DistributedContext(0, "cpu"))
    (tmp_path / DIRECTORY).write_text("in the way")
    with pytest.raises(UserError, match="profile"):
        run_profiled(tmp_path, ProfilerConfig(skip_first=1, active=1), 3)


def run_worker(folder: str) -> list[float]:
    """On one of two ranks: a profile, maxima over ranks, and a metrics line."""
    torch.set_num_threads(1)
    run_profiled(Path(folder), ProfilerConfig(skip_first=1, active=2), 4)
    with DistributedContext(0, "cpu") as dist:
        maxima = dist.max_over_ranks(dist.rank, -dist.rank, math.pi)
        with metric_logger.MetricLogger(Path(folder), dist, num_steps=1) as meter:
            batch: Any = SimpleNamespace(num_tokens=7, num_target_tokens=5)
            meter.log_step(1, [batch], 0.25 + dist.rank, loss=1.0, grad_norm=1.0, lr=1.0)
    return maxima


@pytest.mark.multi
@pytest.mark.slow
def test_profile_of_two_ranks(tmp_path: Path) -> None:
    assert run_ranks(2, run_worker, str(tmp_path)) == [[1, 0, math.pi]] * 2
    for rank in range(2):
        with gzip.open(tmp_path / DIRECTORY / f"rank-{rank}.json.gz", "rt") as lines:
            breakdown = step_breakdown(json.load(lines)["traceEvents"])
        (all_reduce,) = breakdown.collectives
        assert (breakdown.steps, all_reduce.name, all_reduce.calls) == (2, "all-reduce", 4)
        assert all_reduce.bytes == 2 * (64 * 64 * 4 + (1 + len(STOP_SIGNALS)) * 8)
        assert breakdown.exposed > 0
    text = (tmp_path / DIRECTORY / TABLE).read_text()
    assert len(re.findall(r"^\| [01] \|", text, re.MULTILINE)) == 2
    assert "| all-reduce | 2 |" in text
    (line,) = metrics_file.read_metrics(tmp_path)
    assert (line["data_time"], line["num_tokens"]) == (1.25, 14)


def test_optimizer_range_of_torch_is_recognized(tmp_path: Path) -> None:
    """torch names the optimizer range and the step range."""
    weight = torch.nn.Parameter(torch.rand(64, 64))
    optimizer = torch.optim.AdamW([weight])
    with DistributedContext(0, "cpu") as dist, Profiler(ProfilerConfig(1, 1), tmp_path, dist) as profiler:
        for step in range(3):
            profiler.begin_step(step)
            weight.sum().backward()
            optimizer.step()
    with gzip.open(tmp_path / DIRECTORY / "rank-0.json.gz", "rt") as lines:
        assert step_breakdown(json.load(lines)["traceEvents"]).optimizer > 0
    assert profile.peak_memory(torch.device("cpu")) > 2**20
