"""A recipe without a model that prints a word several times."""

from pathlib import Path

import pytest

COUNT = '''"""Counting."""

import signal
from dataclasses import dataclass
from pathlib import Path

from tunekit.checkpoint.run_dir import erase_results
from tunekit.errors import UserError


@dataclass(frozen=True)
class Count:
    word: str
    to: int = 3
    output_dir: str = "counted"


CONFIG = Count


def check(cfg):
    if cfg.to > 100:
        raise UserError(f"to: {cfg.to} takes too long")


def main(cfg, overwrite=False):
    if overwrite:
        erase_results(Path(cfg.output_dir))
    if cfg.to == 0:
        signal.raise_signal(signal.SIGINT)
    print(" ".join([cfg.word] * cfg.to))
'''


@pytest.fixture
def count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory with the recipe `count.py` and the config `count.yaml`, in which the test runs."""
    (tmp_path / "count.py").write_text(COUNT)
    (tmp_path / "count.yaml").write_text("# Counts sheep\nword: sheep\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path
