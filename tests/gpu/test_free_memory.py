"""Memory of a GPU that other processes use is reported before weights are loaded."""

from dataclasses import replace

import pytest

from tests.gpu.test_plan_gpu import described, on, small
from tunekit.errors import UserError
from tunekit.parallel.run import Run
from tunekit.plan import free_memory, outcome
from tunekit.plan.free_memory import Free, Need, compare, needed
from tunekit.plan.machine import GIB, KINDS
from tunekit.plan.room import DRIVER


def gib(number: float) -> int:
    return int(number * GIB)


ALONE = Free("GPU 0", gib(23.1), gib(24))
SHARED = Free("GPU 0", gib(13), gib(24))


@pytest.mark.parametrize(("gpu", "need", "line"), [
    (ALONE, Need(gib(22), gib(16)), "GPU 0: 23.1 of 24.0 GiB free; this config needs about 22.0 GiB"),
    (SHARED, Need(gib(12), gib(10)), "GPU 0: 13.0 of 24.0 GiB free; this config needs about 12.0 GiB"),
    (SHARED, None, "GPU 0: 13.0 of 24.0 GiB free"),
])  # fmt: skip
def test_one_line_where_it_fits(gpu: Free, need: Need | None, line: str) -> None:
    assert compare(gpu, need) == line


def test_a_warning_names_the_other_processes_or_the_config() -> None:
    line = compare(SHARED, Need(gib(22), gib(10)))
    assert line.startswith("warning: GPU 0: 13.0 of 24.0 GiB free; this config needs about 22.0 GiB")
    assert "Other processes use 10.1 GiB" in line and "CUDA_VISIBLE_DEVICES" in line
    for gpu in (ALONE, SHARED):  # too large even for an empty GPU
        line = compare(gpu, Need(gib(30), gib(10)))
        assert line.startswith("warning: ") and "tune plan" in line and "CUDA_VISIBLE_DEVICES" not in line


def test_weights_that_cannot_be_loaded_are_an_error() -> None:
    with pytest.raises(UserError, match=r"GPU 0: 13.0 of 24.0 GiB free; the weights alone need 16.0 GiB.*VISIBLE"):
        compare(SHARED, Need(gib(20), gib(16)))
    with pytest.raises(UserError, match="tune plan"):
        compare(ALONE, Need(gib(140), gib(130)))


def test_the_driver_of_this_process_is_not_counted_twice() -> None:
    plan = outcome.plan(described(small()), on(KINDS["l4"]))
    need = needed(plan)
    assert need.peak == plan.peak.total - DRIVER and 0 < need.weights < need.peak
    assert Free("GPU 0", gib(24) - DRIVER, gib(24)).used_by_others == 0
    sharded = outcome.plan(described(small(), batch=8), replace(on(KINDS["l4"], 2)))
    assert needed(sharded).weights < need.weights


def test_a_cpu_reports_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    free_memory.check(None, Run(device="cpu"))
    assert capsys.readouterr().err == ""
