"""What is compiled for one processor is never taken by another."""

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
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # so that it is again what it was, whatever a test makes of it
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    return tmp_path


@pytest.fixture
def tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The folder on a machine of whose cores Linux tells this."""
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(system, "CPU_INFO", info)

    def folder(text: str) -> Path:
        info.write_text(text)
        return cache_dir.compile_cache_dir()

    return folder


@pytest.mark.parametrize(("text", "old", "new"), [
    (ZEN, "avx2", "avx2 avx512f"), (ZEN, "EPYC", "Ryzen"), (ARM, "asimd", "asimd sve"), (ARM, "0xd40", "0xd4f"),
])  # fmt: skip
def test_another_processor_has_another_folder(text: str, old: str, new: str, tells) -> None:
    assert tells(text) != tells(text.replace(old, new))


def test_the_same_processor_has_one_folder(tells) -> None:
    """Whatever its speed at the moment, and whatever the other cores are."""
    assert tells(ZEN) == tells(ZEN.replace("2596.1", "1200.0")) == tells(ZEN + ARM)


def test_a_system_that_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "CPU_INFO", tmp_path / "nowhere")
    assert cache_dir.compile_cache_dir().parent == tmp_path / "tunekit"


def test_kernels_and_what_torch_compiles_lie_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "true")
    monkeypatch.setattr(cpp_extension, "compiled", lambda words: Path(words[-1]).touch())
    source = tmp_path / "twice.cpp"
    source.touch()
    assert cpp_extension.built(source).parent == cache_dir.compile_cache_dir()
    cli.set_torch_env()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(cache_dir.compile_cache_dir() / "inductor")


def test_where_nothing_can_be_written_torch_keeps_its_own_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "below"))
    (tmp_path / "file").touch()
    cli.set_torch_env()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="a file system that says it may be written to")
def test_where_making_a_folder_fails_torch_keeps_its_own_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache_dir.HOME, "/proc/x")
    cli.set_torch_env()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_a_look_at_a_folder_leaves_nothing(tmp_path: Path) -> None:
    assert cache_dir.is_writable(tmp_path / "a" / "b") and cache_dir.is_writable(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_user_without_a_home_directory_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers with `--user 1234`."""

    def unknown(uid: int) -> NoReturn:
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME", cache_dir.HOME):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert not cache_dir.is_writable(cache_dir.compile_cache_dir()) and not cache_dir.can_write_triton_home()
    assert redact.redact_text("nothing private") == "nothing private"
