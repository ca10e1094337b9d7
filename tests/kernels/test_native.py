"""C++ is compiled once, quietly; what keeps it from being compiled keeps nothing else from working."""

import shutil
from pathlib import Path

import pytest

from tunekit.kernels import cpp_extension
from tunekit.kernels.cpp_extension import load_library

PROGRAM = 'extern "C" int twice(int x) { return 2 * x; }\n'


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file to compile, and an empty place for what is made of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "twice.cpp"
    file.write_text(PROGRAM)
    load_library.cache_clear()
    cpp_extension.warn.cache_clear()
    return file


def test_built_once(source: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    lib = load_library(source)
    if lib is None:
        pytest.skip("no compiler")
    assert lib.twice(21) == 42 and capfd.readouterr() == ("", "")
    load_library.cache_clear()
    monkeypatch.setattr(cpp_extension, "compiled", pytest.fail)
    assert load_library(source).twice(4) == 8
    made = [path for path in (source.parent / "cache").rglob("*") if path.is_file()]
    assert len(made) == 1


@pytest.mark.parametrize(("compiler", "program", "told"), [
    ("no-such-compiler", PROGRAM, "there is no compiler 'no-such-compiler'"),
    ("c++", "int twice(", "error: "),
    ("false", PROGRAM, "exit code 1"),
    ("true", PROGRAM, "No such file or directory"),
])  # fmt: skip
def test_a_failed_build_is_one_line(
    compiler: str, program: str, told: str, source: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    monkeypatch.setenv("CXX", compiler)
    source.write_text(program)
    assert load_library(source) is None and load_library(source) is None
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("warning: C++ cannot be built (") and told in err


def test_no_compiler_is_told_once_for_all_files(source: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert load_library(source) is None and load_library(source.with_name("thrice.cpp")) is None
    assert capfd.readouterr().err.count("\n") == 1


def test_a_build_that_hangs_is_given_up(source: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    slow = source.with_name("slow")
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("CXX", str(slow))
    monkeypatch.setattr(cpp_extension, "SECONDS", 0.2)
    assert load_library(source) is None
    assert "timed out" in capfd.readouterr().err


def test_a_cache_that_cannot_be_written(source: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(source))  # a file
    assert load_library(source) is None
    assert capfd.readouterr().err.count("\n") == 1


def test_a_library_of_another_machine(source: Path, capfd) -> None:
    if shutil.which("c++") is None:
        pytest.skip("no compiler")
    cpp_extension.built(source).write_bytes(b"of another machine")
    assert load_library(source) is None
    assert "cannot be built" in capfd.readouterr().err


def test_a_header_is_part_of_the_source(source: Path) -> None:
    if shutil.which("c++") is None:
        pytest.skip("no compiler")
    header = source.with_name("times.h")
    source.write_text('#include "times.h"\nextern "C" int twice(int x) { return TIMES * x; }\n')
    for times in (2, 3):
        header.write_text(f"#define TIMES {times}\n")
        load_library.cache_clear()
        assert load_library(source).twice(5) == 5 * times
