"""`tune cat`: the text of a recipe or config as it is, comments included."""

import argparse
import sys

from tunekit.cli import registry


def main(args: argparse.Namespace) -> None:
    """Print the file."""
    sys.stdout.write(registry.find_recipe_or_config(args.name).read_text("utf-8"))
