"""`tune options`: every option of a recipe, from the classes that read it."""

import argparse
import json

from tunekit.cli import recipe_loader
from tunekit.config import schema


def main(args: argparse.Namespace) -> None:
    """Print the reference as Markdown, or the JSON Schema for an editor."""
    recipe = recipe_loader.load_recipe(args.recipe).CONFIG
    print(json.dumps(schema.json_schema(recipe), indent=2) if args.schema else schema.options_markdown(recipe))
