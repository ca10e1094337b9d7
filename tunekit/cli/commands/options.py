"""`tune options`: print a reference of all options of a recipe, generated from its config classes."""

import argparse
import json

from tunekit.cli import recipe_loader
from tunekit.config import schema


def main(args: argparse.Namespace) -> None:
    """Print a Markdown reference, or a JSON Schema for editors."""
    recipe = recipe_loader.load_recipe(args.recipe).CONFIG
    print(json.dumps(schema.json_schema(recipe), indent=2) if args.schema else schema.options_markdown(recipe))
