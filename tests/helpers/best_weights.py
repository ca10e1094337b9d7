"""A run on several ranks whose result has the weights of its best step. Has few imports because each rank loads it."""

from pathlib import Path

from tunekit.config import load
from tunekit.recipes import sft


def run_twice(config: Path, best: list[str], short: list[str]) -> None:
    """Run the recipe with both lists of overrides on the ranks of this process."""
    for overrides in (best, short):
        sft.main(load.load_config(sft.CONFIG, config, overrides))
