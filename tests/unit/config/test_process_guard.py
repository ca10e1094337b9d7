"""Code of the user that changes the state of the process: one error, and the state is as before."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tunekit.config.errors import ConfigError
from tunekit.config.process_guard import ChangedProcessError, ProcessGuard
from tunekit.config.user_code import load_user_choices
from tunekit.errors import raise_ctrl_c
from tunekit.training.config import TrainConfig


@pytest.fixture
def ctrl_c_handler() -> Iterator[None]:
    """The handler of `tune`."""
    previous = signal.signal(signal.SIGINT, raise_ctrl_c)
    yield
    signal.signal(signal.SIGINT, previous)


def process_state() -> tuple[object, ...]:
    descriptors = [os.fstat(number).st_ino for number in (1, 2)]
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    return sys.stdout, sys.stderr, *descriptors, set(sys.path), sys.modules["torch"], Path.cwd(), handlers


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("sys.stdout = None", "sys.stdout"),
        ("os.close(2)", "file descriptor 2"),
        ("os.closerange(1, 3)", "file descriptor 1"),
        ("sys.path.clear()", "sys.path"),
        ("sys.modules['torch'] = None", "torch"),
        ("del sys.modules['torch']", "torch"),
        ("os.chdir('/')", "working directory"),
        ("sys.path.clear(); raise GeneratorExit", "sys.path"),
    ],
)
def test_change_is_an_error_and_is_undone(code: str, change: str) -> None:
    before = process_state()
    with pytest.raises(ChangedProcessError, match=f"^my.py: .*{change}"), ProcessGuard(lambda: "my.py"):
        exec(code)
    assert process_state() == before


def test_closed_stream_is_open_again(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ChangedProcessError, match="sys.stderr"), ProcessGuard(lambda: "my.py"):
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115, PTH123
        sys.stderr.close()
    print("shown", file=sys.stderr)
    assert capfd.readouterr().err == "shown\n"


@pytest.mark.parametrize(
    "code",
    [
        "signal.signal(signal.SIGINT, signal.SIG_IGN)",
        "sys.path.insert(0, '/x'); sys.path.remove('/x')",
        "sys.modules['no_such_package'] = None",
        "os.chdir('/'); os.chdir(before)",
    ],
)
def test_harmless_changes_are_accepted(code: str) -> None:
    before, directory = process_state(), Path.cwd()
    with ProcessGuard(lambda: "my.py"):
        exec(code, {"signal": signal, "sys": sys, "os": os, "before": directory})
    sys.modules.pop("no_such_package", None)
    assert process_state() == before


def test_directory_that_was_deleted_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with ProcessGuard(lambda: "my.py"):
        tmp_path.rmdir()


def test_without_code_of_the_user_nothing_is_reported(tmp_path: Path) -> None:
    before = Path.cwd()
    with ProcessGuard(lambda: ""):
        os.chdir(tmp_path)
    assert Path.cwd() == before


@pytest.mark.parametrize(
    "statement",
    ["raise KeyboardInterrupt", "raise GeneratorExit", "raise SystemExit(0)", "raise StopIteration",
     "raise type('Mine', (BaseException,), {})()", "raise type('Mine', (Exception,), {'__str__': None})()"],
)  # fmt: skip
def test_any_exception_of_an_import_is_an_error_with_the_line(
    tmp_path: Path, statement: str, ctrl_c_handler: None
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"import os\n\n{statement}\n")
    with pytest.raises(ConfigError) as error:
        load_user_choices(TrainConfig, [file])
    assert str(error.value).startswith(f"{file}:3: ")


def test_ctrl_c_during_an_import_is_no_error_of_the_file(tmp_path: Path, ctrl_c_handler: None) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    with pytest.raises(KeyboardInterrupt):
        load_user_choices(TrainConfig, [file])
