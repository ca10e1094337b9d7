"""C++ kernels with sanitizers. The selected kernels run on any processor; scripts/sanitize_kernels.py tests all."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = next(path for path in Path(__file__).parents if (path / "pyproject.toml").is_file())
SCRIPT = ROOT / "scripts/sanitize_kernels.py"
TESTS = Path(__file__).with_name("test_hostile_arguments.py")


@pytest.mark.slow
def test_sanitizers_report_nothing() -> None:
    """The script fails if the sanitizers do not report its intentional overflow, or if they report another error."""
    options = "--kernels", "rope,norm,adamw8bit", "--examples", "10"
    command = [sys.executable, SCRIPT, *options, TESTS, "-k", "rope or rms_norm or adamw8bit"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if "has no sanitizer libraries" in process.stderr:
        pytest.skip("the compiler has no sanitizer libraries")
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-5000:]
    assert "8 passed" in process.stdout
