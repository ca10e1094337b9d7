"""`tune validate`: the mistakes of a config, before anything runs."""

import argparse

from tunekit import catalog, launch
from tunekit.errors import UserError


def main(args: argparse.Namespace) -> None:
    """Check the config against the recipe it is written for."""
    path = catalog.config(args.config)
    recipe = args.recipe or catalog.written_for(path)
    if recipe is None:
        raise UserError(f"{path} names no recipe: add a line such as 'recipe: sft', or say --recipe sft")
    launch.config(launch.recipe(recipe), args.config, args.overrides, args.imports)
    print(f"valid: {path}")
