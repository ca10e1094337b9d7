"""Process-wide attention settings, simulated: cuDNN plans are off, and FlashAttention 3 is used where it works."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn.attention import current_flash_attention_impl, register_flash_attention_impl
from torch.nn.attention._registry import _FLASH_ATTENTION_IMPLS

from tests.gpu.flash_on_cpu import CpuFlash, cpu_flash
from tunekit import devices
from tunekit.distributed import attention_setup
from tunekit.distributed.attention_setup import activate_fa3, can_use_fa3, check_flash_attention, configure_attention
from tunekit.distributed.context import DistributedContext

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Hopper that is only asked what it is."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    configure_attention.cache_clear()
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(
        devices, "device_capabilities", lambda device: devices.CPU if device.type == "cpu" else devices.AMPERE
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    yield
    configure_attention.cache_clear()
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.fixture
def fa3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """flash-attn-3 is installed; torch's own registration would need its CUDA kernels."""
    (tmp_path / f"{attention_setup.FA3_MODULE}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    before = _FLASH_ATTENTION_IMPLS["FA3"]
    yield
    register_flash_attention_impl("FA3", register_fn=before)


@pytest.mark.usefixtures("cuda")
def test_a_run_on_cuda_uses_no_cudnn_plans() -> None:
    dist = DistributedContext(0, "cpu")
    dist.device = CUDA
    with dist:
        assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.usefixtures("cuda")
def test_a_run_on_the_cpu_changes_nothing() -> None:
    with DistributedContext(0, "cpu"):
        assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.usefixtures("fa3")
def test_fa3_is_for_hopper_alone() -> None:
    assert can_use_fa3((9, 0))
    assert not any(can_use_fa3(capability) for capability in ((8, 0), (8, 9), (10, 0), (12, 0)))


def test_fa3_is_not_used_where_it_is_not_installed() -> None:
    assert not can_use_fa3((9, 0))


@pytest.mark.usefixtures("fa3", "cuda")
def test_fa3_is_activated_once_when_a_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    activated: list[torch.device] = []
    monkeypatch.setattr(attention_setup, "activate_fa3", activated.append)
    for _ in range(2):
        dist = DistributedContext(0, "cpu")
        dist.device = CUDA
        with dist:
            pass
    assert activated == [CUDA]


@pytest.mark.usefixtures("fa3")
def test_kernels_that_pass_the_check_stay_active() -> None:
    handle: list[CpuFlash] = []

    def register() -> CpuFlash:
        handle.append(CpuFlash())
        return handle[0]

    register_flash_attention_impl("FA3", register_fn=register)
    assert activate_fa3(CPU)
    assert current_flash_attention_impl() == "FA3"
    attention_setup.restore_flash_attention_impl()
    with pytest.raises(NotImplementedError):
        check_flash_attention(CPU)  # they are gone


class NoKernels:
    """A build that registers nothing."""

    def remove(self) -> None:
        """Nothing to take back."""


@pytest.mark.usefixtures("fa3")
def test_kernels_that_fail_the_check_are_taken_back() -> None:
    register_flash_attention_impl("FA3", register_fn=NoKernels)
    assert not activate_fa3(CPU)
    assert current_flash_attention_impl() is None


@pytest.mark.usefixtures("fa3")
def test_a_package_without_kernels_is_left_alone() -> None:
    """torch raises RuntimeError where the module does not register any."""
    assert not activate_fa3(CPU)
    assert current_flash_attention_impl() is None


def test_the_check_accepts_what_the_kernels_are_specified_to_do() -> None:
    with cpu_flash():
        check_flash_attention(CPU)
