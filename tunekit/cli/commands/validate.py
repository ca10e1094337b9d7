"""`tune validate`: check a config without running it."""

import argparse

from tunekit.cli import recipe_loader, registry
from tunekit.errors import UserError


def main(args: argparse.Namespace) -> None:
    """Check the config against its recipe."""
    path = registry.find_config(args.config)
    recipe = args.recipe or registry.recipe_of_config(path)
    if recipe is None:
        raise UserError(f"{path}: missing recipe. Add a line such as 'recipe: sft', or pass --recipe sft")
    recipe_loader.load_checked_config(recipe_loader.load_recipe(recipe), args.config, args.overrides, args.imports)
    print(f"valid: {path}")
