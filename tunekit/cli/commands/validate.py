"""`tune validate`: check a config without running it."""

import argparse
import sys
from itertools import chain

from tunekit.cli import recipe_loader
from tunekit.training.config import TrainConfig
from tunekit.training.data_checks import column_warnings, long_row_warnings


def main(args: argparse.Namespace) -> None:
    """Check the config against its recipe."""
    path, name = recipe_loader.find_config_and_recipe(args)
    recipe = recipe_loader.load_recipe(name)
    cfg = recipe_loader.load_checked_config(recipe, args.config, args.overrides, args.imports)
    for warning in chain(long_row_warnings(cfg), column_warnings(cfg)) if isinstance(cfg, TrainConfig) else ():
        print(f"warning: {warning}", file=sys.stderr)
    print(f"valid: {path}")
