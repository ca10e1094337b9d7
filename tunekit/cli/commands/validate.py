"""`tune validate`: the mistakes of a config, before anything runs."""

import argparse

from tunekit.cli import recipe_loader, registry
from tunekit.errors import UserError


def main(args: argparse.Namespace) -> None:
    """Check the config against the recipe it is written for."""
    path = registry.find_config(args.config)
    recipe = args.recipe or registry.recipe_of_config(path)
    if recipe is None:
        raise UserError(f"{path} names no recipe: add a line such as 'recipe: sft', or say --recipe sft")
    recipe_loader.load_checked_config(recipe_loader.load_recipe(recipe), args.config, args.overrides, args.imports)
    print(f"valid: {path}")
