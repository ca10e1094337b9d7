"""Machines on which Triton cannot build kernels: a warning and PyTorch operations, not a crash.

The failures are real ones of Triton's own build of C extensions. Tensors are fake and claim to be on a GPU: without
one, Triton fails at the first launch.
"""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tunekit.devices import AMPERE
from tunekit.kernels import adamw8bit, cache_dir, cross_entropy, glu, nf4, rms_norm, rope, triton_support

pytest.importorskip("triton")
from triton.runtime.build import compile_module_from_src  # noqa: E402

SOURCE = """
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "example", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_example(void) { return PyModule_Create(&module); }
"""


def build_extension() -> None:
    """Build an extension as Triton does before it launches its first kernel."""
    compile_module_from_src(SOURCE, "example")


def write_compiler(path: Path, words: str) -> str:
    path.write_text(f"#!/bin/sh\n{words}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert "C compiler" in triton_support.find_failure(build_extension)


@pytest.mark.parametrize("words", ["exit 1", 'exec cc -nostdinc "$@" 2>/dev/null'], ids=["broken", "no Python.h"])
def test_compiler_that_fails(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CC", write_compiler(tmp_path / "compiler", words))
    assert "exit status" in triton_support.find_failure(build_extension)


def test_directory_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert str(tmp_path) in triton_support.find_failure(build_extension)


def test_working_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert triton_support.find_failure(build_extension) == ""


# Directories of compilers


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home directory without any settings."""
    names = "TRITON_CACHE_DIR", "TRITON_HOME", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME", cache_dir.CACHE_VARIABLE
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is restored, whatever is set meanwhile
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    cache_dir.get_compiler_cache_directory.cache_clear()
    yield tmp_path
    cache_dir.get_compiler_cache_directory.cache_clear()


def make_unwritable(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home that not even root can write to."""
    (home / "file").touch()
    monkeypatch.setenv("HOME", str(home / "file"))


def test_writable_home_is_left_to_triton(home: Path) -> None:
    cache_dir.set_compiler_cache_directories()
    assert "TRITON_CACHE_DIR" not in os.environ
    assert not list(home.iterdir())


def test_unwritable_home_moves_caches_to_the_tunekit_cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_unwritable(home, monkeypatch)
    monkeypatch.setenv(cache_dir.CACHE_VARIABLE, str(home / "cache"))
    cache_dir.set_compiler_cache_directories()
    assert os.environ["TRITON_CACHE_DIR"] == str(cache_dir.compile_cache_dir() / "triton")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(cache_dir.compile_cache_dir() / "inductor")
    assert triton_support.find_failure(build_extension) == ""


def test_unwritable_caches_move_to_a_private_directory(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_unwritable(home, monkeypatch)
    cache_dir.set_compiler_cache_directories()
    directory = Path(os.environ["TRITON_CACHE_DIR"]).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert triton_support.find_failure(build_extension) == ""


def test_directories_of_users_stay(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_unwritable(home, monkeypatch)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    cache_dir.set_compiler_cache_directories()
    assert os.environ["TRITON_CACHE_DIR"] == "/elsewhere"
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


# Operations that replace kernels


def rotate(x: Tensor) -> Tensor:
    heads, table = x.view(1, 4, 2, 32), x.new_empty(1, 4, 1, 16, dtype=torch.float32)
    return rope.apply_rope(heads, heads, rope.RopeTables(table, table))[0]


def take_losses(x: Tensor) -> Tensor:
    targets = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    return cross_entropy.compute_token_losses(x, targets, None, [1.0, 0.0, 0.0, 0.0], True)


def step_adamw(x: Tensor) -> Tensor:
    codes = torch.zeros(x.numel(), dtype=torch.uint8, device=x.device)
    moments = adamw8bit.Moments(codes, codes.clone(), x.new_zeros(2, 1, dtype=torch.float32))
    adamw8bit.adamw8bit_step(
        x.view(-1), x.view(-1), moments, adamw8bit.AdamWHyperparams(1e-3, 0.0, (0.9, 0.99), 1e-8, 1)
    )
    return x


def dequantize(x: Tensor) -> Tensor:
    packed = torch.zeros(4, 32, dtype=torch.uint8, device=x.device)
    return nf4.dequantize(packed, torch.zeros(4, 4, dtype=torch.uint8, device=x.device))


DISPATCHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda x: rms_norm.rms_norm(x, x.new_zeros(64), 1e-6),
    "gated_activation": lambda x: glu.gated_activation("silu", x, x),
    "rope": rotate,
    "losses": take_losses,
    "entropies": lambda x: cross_entropy.token_entropies(x, 1.0, None),
    "adamw8bit": step_adamw,
    "dequantize": dequantize,
}


# References that take tensors apart by indices, which torch without CUDA refuses to do even with fake tensors
REPLACED: dict[str, tuple[ModuleType, str, Callable[..., Tensor]]] = {
    "losses": (cross_entropy, "token_losses_reference", lambda logits, *_: logits.new_empty(len(logits))),
    "adamw8bit": (adamw8bit, "step_reference", lambda weight, *_: weight),
    "dequantize": (nf4, "decode", lambda weight, into: into),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton works with a GPU")
@pytest.mark.parametrize("name", DISPATCHERS)
def test_kernels_that_cannot_launch_leave_their_work_to_torch(
    name: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in REPLACED:
        monkeypatch.setattr(*REPLACED[name])
    monkeypatch.setattr(triton_support, "device_capabilities", lambda device: AMPERE)
    triton_support.can_launch.cache_clear()
    with FakeTensorMode(), torch.no_grad():
        x = torch.zeros(4, 64, device="cuda", dtype=torch.bfloat16)
        for _ in range(2):
            assert DISPATCHERS[name](x).device.type == "cuda"
    triton_support.can_launch.cache_clear()
    assert capfd.readouterr().err.count("warning: Triton kernels cannot be built") == 1
