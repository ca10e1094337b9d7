"""`tune validate`: check a config without running it."""

import argparse

from tunekit.cli import recipe_loader


def main(args: argparse.Namespace) -> None:
    """Check the config against its recipe."""
    path, recipe = recipe_loader.find_config_and_recipe(args)
    recipe_loader.load_checked_config(recipe_loader.load_recipe(recipe), args.config, args.overrides, args.imports)
    print(f"valid: {path}")
