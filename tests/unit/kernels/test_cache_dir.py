"""Kernels that are compiled for one CPU are not used by another."""

import os
import pwd
from pathlib import Path
from typing import NoReturn

import pytest

from tunekit import system
from tunekit.cli import main as cli
from tunekit.hub import redact
from tunekit.kernels import cache_dir, cpp_extension

ZEN = "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC\ncpu MHz\t\t: 2596.1\nflags\t\t: fpu avx2\n\n"
ARM = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n\n"


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # so that it is restored after the test
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    return tmp_path


@pytest.fixture
def dir_for_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return the cache directory on a machine with the given /proc/cpuinfo."""
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(system, "CPU_INFO", info)

    def get_dir(text: str) -> Path:
        info.write_text(text)
        return cache_dir.compile_cache_dir()

    return get_dir


@pytest.mark.parametrize(("text", "old", "new"), [
    (ZEN, "avx2", "avx2 avx512f"), (ZEN, "EPYC", "Ryzen"), (ARM, "asimd", "asimd sve"), (ARM, "0xd40", "0xd4f"),
])  # fmt: skip
def test_another_cpu_has_another_directory(text: str, old: str, new: str, dir_for_cpu) -> None:
    assert dir_for_cpu(text) != dir_for_cpu(text.replace(old, new))


def test_same_cpu_has_one_directory(dir_for_cpu) -> None:
    """Neither the current clock speed nor other cores matter."""
    assert dir_for_cpu(ZEN) == dir_for_cpu(ZEN.replace("2596.1", "1200.0")) == dir_for_cpu(ZEN + ARM)


def test_missing_cpuinfo_uses_a_default_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "CPU_INFO", tmp_path / "missing")
    assert cache_dir.compile_cache_dir().parent == tmp_path / "tunekit"


def test_kernels_and_inductor_use_the_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "true")
    monkeypatch.setattr(cpp_extension, "run_compiler", lambda args: Path(args[-1]).touch())
    source = tmp_path / "twice.cpp"
    source.touch()
    assert cpp_extension.build_library(source).parent == cache_dir.compile_cache_dir()
    cli.set_torch_env()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(cache_dir.compile_cache_dir() / "inductor")


def test_unwritable_cache_keeps_the_default_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "below"))
    (tmp_path / "file").touch()
    cli.set_torch_env()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a read-only file system that reports to be writable")
def test_failing_mkdir_keeps_the_default_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache_dir.CACHE_VARIABLE, "/proc/x")
    cli.set_torch_env()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_is_writable_creates_nothing(tmp_path: Path) -> None:
    assert cache_dir.is_writable(tmp_path / "a" / "b") and cache_dir.is_writable(tmp_path)
    assert not list(tmp_path.iterdir())


def test_user_without_home_directory_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers with `--user 1234` have such users."""

    def unknown(uid: int) -> NoReturn:
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME", cache_dir.CACHE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert not cache_dir.is_writable(cache_dir.compile_cache_dir()) and not cache_dir.can_write_triton_home()
    assert redact.redact_text("nothing private") == "nothing private"
