"""Checks that crash, hang, raise or do not end their children: each is reported, and the others run."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.wait import has_exited, wait_until
from tunekit.selftest.checklist import Check
from tunekit.selftest.result import Outcome
from tunekit.selftest.runner import Runner

CHECKS_FILE = """
import os, signal, subprocess, sys, threading
from pathlib import Path
from tunekit.selftest.result import CheckFailedError, CheckSkippedError, Result

def check_crash(context):
    os.kill(os.getpid(), signal.SIGSEGV)

def check_hang(context):
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    Path(os.environ["CHILD_FILE"]).write_text(str(child.pid))
    threading.Event().wait()

def check_error(context):
    raise ZeroDivisionError("by zero")

def check_wrong(context):
    raise CheckFailedError("off by one")

def check_absent(context):
    raise CheckSkippedError("no such device")

def check_fine(context):
    (context.directory / "file").write_text("x")
    return Result("all fine", {"number": 1.5})

FUNCTIONS = {"crash": check_crash, "hang": check_hang, "error": check_error}
FUNCTIONS |= {"wrong": check_wrong, "absent": check_absent, "fine": check_fine}
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Outcome]]:
    """Run checks of CHECKS_FILE, each with a time limit of two seconds."""
    package = tmp_path / "demo_selftest"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "demo.py").write_text(CHECKS_FILE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CHILD_FILE", str(tmp_path / "child"))

    def run_checks(*names: str, **options) -> dict[str, Outcome]:
        runner = Runner("cpu", False, lambda outcome: None, package="demo_selftest", **options)
        outcomes = runner.run([Check(f"demo.{name}", "demo", 2) for name in names])
        assert [outcome.check for outcome in outcomes] == [f"demo.{name}" for name in names]
        return {outcome.check.removeprefix("demo."): outcome for outcome in outcomes}

    return run_checks


def test_what_a_check_does_ends_no_other(run: Callable[..., dict[str, Outcome]], tmp_path: Path) -> None:
    outcomes = run("fine", "crash", "error", "wrong", "hang", "absent")
    assert {name: outcome.status for name, outcome in outcomes.items()} == {
        "fine": "passed",
        "crash": "failed",
        "error": "failed",
        "wrong": "failed",
        "hang": "failed",
        "absent": "skipped",
    }
    assert outcomes["fine"].values == {"number": 1.5}
    assert "SIGSEGV" in outcomes["crash"].detail and any("crash" in line for line in outcomes["crash"].values["log"])
    assert "ZeroDivisionError: by zero (at demo.py:" in outcomes["error"].detail
    assert outcomes["wrong"].detail == "off by one"
    assert "no result after" in outcomes["hang"].detail
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: has_exited(child))  # it is killed with the check, but not waited for


def test_checks_after_the_total_time_limit_are_skipped(run: Callable[..., dict[str, Outcome]]) -> None:
    outcomes = run("fine", "absent", total_seconds=0.5)
    assert {outcome.status for outcome in outcomes.values()} == {"skipped"}
    assert "0.5 s" in outcomes["fine"].detail
