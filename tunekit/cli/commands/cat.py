"""`tune cat`: print the source of a recipe or config."""

import argparse
import sys

from tunekit.cli import registry
from tunekit.system import read_utf8


def main(args: argparse.Namespace) -> None:
    """Print the file."""
    sys.stdout.write(read_utf8(registry.find_source(args.name)))
