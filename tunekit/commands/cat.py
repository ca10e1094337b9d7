"""`tune cat`: the text of a recipe or config as it is, comments included."""

import argparse
import sys

from tunekit import catalog


def main(args: argparse.Namespace) -> None:
    """Print the file."""
    sys.stdout.write(catalog.either(args.name).read_text("utf-8"))
