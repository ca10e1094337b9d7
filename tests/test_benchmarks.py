"""Benchmarks start: they are run by hand, and what they import may have moved."""

import runpy
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = sorted(file.stem for file in HERE.glob("*.py") if "ArgumentParser(" in file.read_text("utf-8"))
NEEDED = {"compare": "matplotlib", "ladder": "matplotlib", "scaling": "matplotlib"}
NEEDED |= dict.fromkeys(("triton_checks", "triton_compile"), "triton")


@pytest.mark.parametrize("name", SCRIPTS)
def test_says_what_it_can_be_told(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip(NEEDED.get(name, "torch"))
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(HERE / f"{name}.py"), run_name="__main__")
    assert "usage:" in capsys.readouterr().out
