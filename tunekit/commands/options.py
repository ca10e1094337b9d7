"""`tune options`: every option of a recipe, from the classes that read it."""

import argparse
import json

from tunekit import launch
from tunekit.config import schema


def main(args: argparse.Namespace) -> None:
    """Print the reference as Markdown, or the JSON Schema for an editor."""
    recipe = launch.recipe(args.recipe).RECIPE
    print(json.dumps(schema.json_schema(recipe), indent=2) if args.schema else schema.reference(recipe))
