"""Memory of a GPU that other processes use is reported before weights are loaded."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.gpu.test_plan_gpu import described, on, small
from tunekit import devices
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.plan import estimate, free_memory
from tunekit.plan.free_memory import (
    FreeMemory,
    RequiredMemory,
    compare_memory,
    count_reclaimable,
    name_gpu,
    required_memory,
)
from tunekit.plan.hardware import GIB, GPUS
from tunekit.plan.memory import CUDA_CONTEXT_BYTES


def gib(number: float) -> int:
    return int(number * GIB)


ALONE = FreeMemory("GPU 0", gib(23.1), gib(24))
SHARED = FreeMemory("GPU 0", gib(13), gib(24))


@pytest.mark.parametrize(("gpu", "need", "line"), [
    (ALONE, RequiredMemory(gib(22), gib(16)), "GPU 0: 23.1 of 24.0 GiB free; this config needs about 22.0 GiB"),
    (SHARED, RequiredMemory(gib(12), gib(10)), "GPU 0: 13.0 of 24.0 GiB free; this config needs about 12.0 GiB"),
    (SHARED, None, "GPU 0: 13.0 of 24.0 GiB free"),
])  # fmt: skip
def test_one_line_where_it_fits(gpu: FreeMemory, need: RequiredMemory | None, line: str) -> None:
    assert compare_memory(gpu, need) == line


def test_a_warning_names_the_other_processes_or_the_config() -> None:
    line = compare_memory(SHARED, RequiredMemory(gib(22), gib(10)))
    assert line.startswith("warning: GPU 0: 13.0 of 24.0 GiB free; this config needs about 22.0 GiB")
    assert "Other processes use 10.1 GiB" in line and "CUDA_VISIBLE_DEVICES" in line
    for gpu in (ALONE, SHARED):  # too large even for an empty GPU
        line = compare_memory(gpu, RequiredMemory(gib(30), gib(10)))
        assert line.startswith("warning: ") and "tune plan" in line and "CUDA_VISIBLE_DEVICES" not in line


def test_weights_that_cannot_be_loaded_are_an_error() -> None:
    with pytest.raises(UserError, match=r"GPU 0: 13.0 of 24.0 GiB free; the weights alone need 16.0 GiB.*VISIBLE"):
        compare_memory(SHARED, RequiredMemory(gib(20), gib(16)))
    with pytest.raises(UserError, match="tune plan"):
        compare_memory(ALONE, RequiredMemory(gib(140), gib(130)))


def test_the_driver_of_this_process_is_not_counted_twice() -> None:
    plan = estimate.estimate(described(small()), on(GPUS["l4"]))
    need = required_memory(plan)
    assert need.peak == plan.peak.total - CUDA_CONTEXT_BYTES and 0 < need.weights < need.peak
    assert FreeMemory("GPU 0", gib(24) - CUDA_CONTEXT_BYTES, gib(24)).used_by_others == 0
    sharded = estimate.estimate(described(small(), global_batch_size=8), replace(on(GPUS["l4"], 2)))
    assert required_memory(sharded).weights < need.weights


def test_memory_of_this_process_is_not_blamed_on_others() -> None:
    """For example in a notebook that has trained before."""
    gpu = FreeMemory("GPU 0", gib(5), gib(24), allocated=gib(16))
    assert gpu.used_by_others == gib(24) - gib(5) - gib(16) - CUDA_CONTEXT_BYTES
    line = compare_memory(gpu, RequiredMemory(gib(18), gib(4)))
    assert "This process already uses 16.0 GiB" in line and "Other processes" not in line


def test_an_intel_gpu_is_selected_by_its_own_variable() -> None:
    assert "ZE_AFFINITY_MASK" in compare_memory(
        SHARED._replace(variable="ZE_AFFINITY_MASK"), RequiredMemory(gib(22), gib(10))
    )


def test_the_page_cache_is_free_memory_of_a_gpu_that_uses_the_hosts() -> None:
    """A GB10 after a download: CUDA reports 41.5 GiB free, and the system can still give 115.7."""
    assert count_reclaimable(gib(41.5), gib(119.7), gib(115.7)) == gib(115.7)
    assert count_reclaimable(gib(41.5), gib(100), gib(115.7)) == gib(100)
    assert count_reclaimable(gib(41.5), gib(119.7), None) == gib(41.5)


@pytest.mark.parametrize("integrated", [0, 1])
def test_integrated_gpus_are_recognized(integrated: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(is_integrated=integrated))
    assert devices.shares_host_memory(torch.device("cuda", 0)) == bool(integrated)
    assert not devices.shares_host_memory(torch.device("cpu"))


def test_intel_gpus_that_do_not_report_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> tuple[int, int]:
        raise RuntimeError("The device (Intel(R) Graphics) doesn't support querying the available free memory.")

    for kind in ("xpu", "cuda"):
        monkeypatch.setattr(torch.get_device_module(kind), "mem_get_info", fail)
    assert devices.memory_info(torch.device("xpu", 0)) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(RuntimeError):
        devices.memory_info(torch.device("cuda", 7))


def test_a_gpu_is_named_with_the_variable_that_selected_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`GPU 0` is the first visible one: nvidia-smi may list it as GPU 3."""
    run, gpu = DistributedContext(device="cpu"), torch.device("cuda", 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert name_gpu(gpu, run, "CUDA_VISIBLE_DEVICES") == "GPU 0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert name_gpu(gpu, run, "CUDA_VISIBLE_DEVICES") == "GPU 0 (CUDA_VISIBLE_DEVICES=3)"


def test_a_cpu_reports_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    free_memory.check(None, DistributedContext(device="cpu"))
    assert capsys.readouterr().err == ""
