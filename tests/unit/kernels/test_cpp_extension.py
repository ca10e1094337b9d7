"""C++ extensions are compiled once and silently; a failure is a warning, and everything else works."""

import shutil
from pathlib import Path

import pytest

from tunekit.kernels import cpp_extension
from tunekit.kernels.cpp_extension import load_library

PROGRAM = 'extern "C" int twice(int x) { return 2 * x; }\n'


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source file, and an empty cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "twice.cpp"
    file.write_text(PROGRAM)
    load_library.cache_clear()
    cpp_extension.warn_unavailable.cache_clear()
    return file


def test_library_is_built_once(
    source: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lib = load_library(source)
    if lib is None:
        pytest.skip("no compiler")
    assert lib.twice(21) == 42 and capfd.readouterr() == ("", "")
    load_library.cache_clear()
    monkeypatch.setattr(cpp_extension, "run_compiler", pytest.fail)
    assert load_library(source).twice(4) == 8
    libraries = [path for path in (source.parent / "cache").rglob("*") if path.is_file()]
    assert len(libraries) == 1


@pytest.mark.parametrize(("compiler", "program", "reason"), [
    ("no-such-compiler", PROGRAM, "no-such-compiler"),
    ("c++", "int twice(", "error: "),
    ("false", PROGRAM, "exit code 1"),
    ("true", PROGRAM, "No such file or directory"),
])  # fmt: skip
def test_failed_build_is_a_one_line_warning(
    compiler: str, program: str, reason: str, source: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    monkeypatch.setenv("CXX", compiler)
    source.write_text(program)
    assert load_library(source) is None and load_library(source) is None
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("warning: ") and reason in err


def test_missing_compiler_is_reported_once(source: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert load_library(source) is None and load_library(source.with_name("thrice.cpp")) is None
    assert capfd.readouterr().err.count("\n") == 1


def test_hanging_build_times_out(source: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    slow = source.with_name("slow")
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("CXX", str(slow))
    monkeypatch.setattr(cpp_extension, "BUILD_TIMEOUT", 0.2)
    assert load_library(source) is None
    assert "timed out" in capfd.readouterr().err


def test_unwritable_cache_is_a_warning(source: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(source))  # a file
    assert load_library(source) is None
    assert capfd.readouterr().err.count("\n") == 1


def test_library_of_another_machine_is_a_warning(source: Path, capfd) -> None:
    if shutil.which("c++") is None:
        pytest.skip("no compiler")
    cpp_extension.build_library(source).write_bytes(b"of another machine")
    assert load_library(source) is None
    assert "warning: " in capfd.readouterr().err


def test_header_change_triggers_a_rebuild(source: Path) -> None:
    if shutil.which("c++") is None:
        pytest.skip("no compiler")
    header = source.with_name("times.h")
    source.write_text('#include "times.h"\nextern "C" int twice(int x) { return TIMES * x; }\n')
    for times in (2, 3):
        header.write_text(f"#define TIMES {times}\n")
        load_library.cache_clear()
        assert load_library(source).twice(5) == 5 * times
