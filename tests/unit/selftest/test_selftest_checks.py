"""The list of checks covers every kernel, and a check never passes on a fallback."""

import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

from tunekit import devices
from tunekit.errors import UserError
from tunekit.kernels.kernel_case import Kernel, KernelCase, KernelUnavailableError, require_triton_launches
from tunekit.kernels.kernel_table import KERNELS
from tunekit.selftest import model_checks
from tunekit.selftest.checklist import CHECKS, SYSTEM, Check, select_checks
from tunekit.selftest.context import Context, synchronize
from tunekit.selftest.kernel_checks import check_kernel
from tunekit.selftest.process_checks import check_one_rank, check_several_ranks, num_ranks
from tunekit.selftest.result import CheckFailedError, CheckSkippedError

FOLDER = Path(__file__).parents[3] / "kernels"
# Files that contain no kernel.
HELPERS = {
    "__init__",
    "recompute",
    "torch_compile",
    "cpp_extension",
    "custom_op",
    "fake_mode",
    "cache_dir",
    "malloc",
}
HELPERS |= {"argument_checks", "device_tensors", "nf4_codes", "prefix_sum", "sequence_layout"}
HELPERS |= {
    "attention_choice",
    "attention_decode",
    "attention_ranges",
    "kernel_case",
    "kernel_table",
    "lm_head",
    "triton_support",
}


def context(device: str) -> Context:
    return Context(torch.device(device), Path())


def test_every_kernel_has_a_check() -> None:
    files = {path.stem for path in FOLDER.glob("*.py")} - HELPERS
    assert {stem for stem in files if not stem.endswith(("_triton", "_gpu", "_cpu", "_cases"))} <= KERNELS.keys()
    assert {check.short_name for check in CHECKS if check.group == "kernels"} == {"compile", *KERNELS}


def test_sharding_over_one_rank_changes_no_number() -> None:
    assert check_one_rank(context("cpu")).values["backend"] == "gloo"


def test_every_check_has_a_function() -> None:
    for check in CHECKS:
        assert check.short_name in import_module(f"tunekit.selftest.{check.module}").FUNCTIONS


@pytest.mark.parametrize(
    ("names", "expected"),
    [(["glu"], {"kernels.glu"}), (["kernels.rope", "limits"], {"kernels.rope", "speed.limits"}), ([SYSTEM], {SYSTEM})],
)
def test_checks_are_selected_by_name(names: list[str], expected: set[str]) -> None:
    assert {check.name for check in select_checks(names)} == expected


def test_checks_are_selected_by_group() -> None:
    selected = select_checks(["model"])
    assert len(selected) > 1 and {check.group for check in selected} == {"model"}
    assert select_checks([]) == list(CHECKS)


def test_unknown_names_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match="kernels.glu"):
        select_checks(["kernels.gluu"])


def test_a_fallback_on_a_gpu_is_skipped_and_does_not_pass() -> None:
    with pytest.raises(KernelUnavailableError), require_triton_launches():
        torch.ones(1)


def test_other_devices_skip_compiled_kernels() -> None:
    with pytest.raises(CheckSkippedError, match="meta"):
        check_kernel(KERNELS["glu"], context("meta"))


def test_devices_without_a_backend_skip_checks_of_processes() -> None:
    for check in (check_one_rank, check_several_ranks):
        with pytest.raises(CheckSkippedError, match="mps"):
            check(context("mps"))
    with pytest.raises(CheckSkippedError, match="XCCL needs a GPU for each process"):
        num_ranks(context("xpu"))


@pytest.mark.parametrize("kind", ["xpu", "mps"])
def test_times_wait_for_every_kind_of_accelerator(kind: str) -> None:
    """None of them is present here: torch refuses to wait for it. Without waiting, only launches would be timed."""
    with pytest.raises(RuntimeError):
        synchronize(torch.device(kind))
    synchronize(torch.device("cpu"))


def test_a_wrong_number_is_named() -> None:
    def cases(device: torch.device) -> Iterator[KernelCase]:
        yield KernelCase("silu", lambda x: 1.001 * x, lambda x: x, {"x": torch.ones(3)})

    with pytest.raises(CheckFailedError, match="silu, output 0"):
        check_kernel(Kernel("glu", cases), context("cpu"))


def test_names_are_unique() -> None:
    names = [name for check in CHECKS for name in (check.name, check.short_name)]
    assert len(names) == len(set(names)) and isinstance(CHECKS[0], Check) and CHECKS[0].name == SYSTEM


def test_resuming_on_a_gpu_uses_the_deterministic_option_and_restores_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    before = devices.read_numerics()
    with model_checks.deterministic(context("meta")):
        inside = devices.read_numerics()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert inside == before._replace(deterministic=True, warn_only=True, fill_memory=False)
    assert devices.read_numerics() == before
