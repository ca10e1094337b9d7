"""Benchmarks start: they are run by hand, and what they import may have moved."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = sorted(file.stem for file in HERE.glob("*.py") if "ArgumentParser" in file.read_text("utf-8"))
NEEDED = {"compare": "matplotlib", "ladder": "matplotlib", "scaling": "matplotlib", "loading": "transformers"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_says_what_it_can_be_told(name: str) -> None:
    pytest.importorskip(NEEDED.get(name, "torch"))
    done = subprocess.run([sys.executable, HERE / f"{name}.py", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"python benchmarks/{name}.py" in done.stdout
