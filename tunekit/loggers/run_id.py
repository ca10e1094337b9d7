"""Run id of an experiment tracker, stored in the run directory so that a resumed run continues its curves."""

from collections.abc import Callable
from pathlib import Path


def run_id(folder: Path, make: Callable[[], str]) -> str:
    """Return the run id stored in `folder`, or create and store one."""
    file = folder / "run-id"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(make(), encoding="utf-8")
    return file.read_text(encoding="utf-8")
