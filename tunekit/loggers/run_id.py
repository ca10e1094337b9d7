"""A run that is started again goes on in the same curves: the service's name for it stays in the run's folder."""

from collections.abc import Callable
from pathlib import Path


def run_id(folder: Path, make: Callable[[], str]) -> str:
    """The name kept in `folder`, else a new one."""
    file = folder / "run-id"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(make(), encoding="utf-8")
    return file.read_text(encoding="utf-8")
