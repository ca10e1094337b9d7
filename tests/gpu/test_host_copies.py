"""Copies of a state in host memory: of a fixed size when pinned, and only where the host has the memory."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from tunekit import env_info
from tunekit.adapters.config import pissa_factors
from tunekit.checkpoint.host_copy import HostCopies, Staging
from tunekit.checkpoint.training_state import Checkpointer
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.kernels.device_tensors import HostCopy
from tunekit.plan import oom_report

PINNED = torch.AcceleratorError("CUDA error: out of memory")
GPU = torch.device("cuda")


def test_tensors_of_any_size_pass_through_two_blocks() -> None:
    staging = Staging(torch.device("cpu"), 64)
    for tensor in (
        torch.randn(5, 7),
        torch.randn(16),
        torch.randn(3, 33).bfloat16().T,
        torch.arange(7, dtype=torch.uint8),
    ):
        copied = torch.empty(tensor.shape, dtype=tensor.dtype)
        staging.copy(tensor, copied)
        assert torch.equal(copied, tensor)
    assert [len(block) for block in staging.blocks] == [64, 64]


def test_memory_of_copies_is_exact_and_used_again() -> None:
    copies, tensor = HostCopies(), torch.randn(1000, 33)
    assert copies.missing_bytes({"a": tensor}) == tensor.nbytes
    first = copies.copy("a", tensor)
    assert first.untyped_storage().nbytes() == tensor.nbytes and copies.missing_bytes({"a": tensor}) == 0
    assert copies.copy("a", tensor + 1) is first and torch.equal(first, tensor + 1)


def test_a_copy_for_the_host_is_of_the_moment_it_was_made() -> None:
    """Tokens of a generation are drawn into one tensor, step after step, and read later."""
    tokens = torch.tensor([[3], [5]])
    copied, drawn = HostCopy(tokens), HostCopy(tokens[:, 0])
    tokens += 1
    assert copied.read() == [[3], [5]] and drawn.read() == [3, 5]


@pytest.mark.parametrize("available", ["machine", "container", "enough"])
def test_a_state_is_saved_in_the_foreground_where_memory_is_short(
    available: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    info, group = tmp_path / "meminfo", tmp_path / "cgroup"
    group.mkdir()
    info.write_text(f"MemTotal: 999 kB\nMemAvailable: {1 if available == 'machine' else 999_999} kB\n")
    (group / "memory.max").write_text("max\n" if available != "container" else "5000\n")
    (group / "memory.current").write_text("4900\n")
    (group / "memory.stat").write_text("anon 4000\ninactive_file 300\nactive_file 100\n")
    monkeypatch.setattr(env_info, "MEMORY_INFO", info)
    monkeypatch.setattr(env_info, "CGROUP", group)
    model = nn.Linear(30, 30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rate = LambdaLR(optimizer, lambda step: 1.0)
    with Checkpointer(
        tmp_path / "state", model, optimizer, rate, 1, DistributedContext(device="cpu"), background=True
    ) as state:
        state.save(1)
        assert (state.async_save is None) == (available != "enough")
        assert ("async_save" in capsys.readouterr().err) == (available != "enough")
    assert (tmp_path / "state/00000001").is_dir()


def test_host_memory_is_not_reported_as_that_of_the_gpu() -> None:
    for error in (PINNED, MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")):
        with pytest.raises(UserError, match="host memory") as caught, oom_report.report_oom(None, GPU):
            raise error
        assert "async_save" in str(caught.value)
    assert not oom_report.host_is_full(torch.OutOfMemoryError("CUDA out of memory"))


def test_principal_directions_fork_no_generator_of_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    forked = []
    fork = torch.random.fork_rng

    def record(devices: list[torch.device] | None = None) -> object:
        forked.append(devices)
        return fork(devices)

    monkeypatch.setattr(torch.random, "fork_rng", record)
    pissa_factors(torch.randn(8, 8), 2, torch.Generator().manual_seed(0))
    assert forked == [[]]
