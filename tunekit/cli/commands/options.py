"""`tune options`: print a reference of the options of a recipe, generated from its config classes."""

import argparse
import json
import sys

from tunekit.cli import recipe_loader
from tunekit.config import schema


def main(args: argparse.Namespace) -> None:
    """Print a Markdown reference, or a JSON Schema for editors."""
    recipe = recipe_loader.load_recipe(args.recipe).CONFIG
    if args.schema:
        print(json.dumps(schema.json_schema(recipe), indent=2))
    elif args.key is not None:
        print(schema.key_markdown(recipe, args.key))
    elif args.all:
        print(schema.options_markdown(recipe))
    else:
        print(schema.overview_markdown(recipe))
        commands = f"tune options {args.recipe} KEY, and those of all keys with tune options {args.recipe} --all"
        print(f"All kinds of a key: {commands}", file=sys.stderr)
