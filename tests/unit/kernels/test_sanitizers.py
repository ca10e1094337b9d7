"""Kernels that run on any processor, with sanitizers. scripts/sanitize_kernels.py runs all of them."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = next(path for path in Path(__file__).parents if (path / "pyproject.toml").is_file())
SCRIPT = ROOT / "scripts/sanitize_kernels.py"
TESTS = Path(__file__).with_name("test_hostile_arguments.py")


@pytest.mark.slow
def test_sanitizers_report_nothing() -> None:
    """The overflow that the script makes on purpose is reported, and no other one."""
    options = "--kernels", "rope,norm,adamw8bit", "--examples", "10"
    command = [sys.executable, SCRIPT, *options, TESTS, "-k", "rope or rms_norm or adamw8bit"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if "has no sanitizer libraries" in done.stderr:
        pytest.skip("the compiler has no sanitizer libraries")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    assert "8 passed" in done.stdout
