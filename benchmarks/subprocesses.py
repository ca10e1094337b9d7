"""Measurements in new processes, so that caches and memory of one do not affect the next."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


def run_script(file: str, *args: str, env: Mapping[str, str] | None = None) -> Any:
    """Run a Python script; return the JSON value in the last line of its output."""
    command = [sys.executable, file, *args]
    process = subprocess.run(command, env=os.environ | (env or {}), capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}\n{process.stderr[-3000:]}")
    return json.loads(process.stdout.splitlines()[-1])
