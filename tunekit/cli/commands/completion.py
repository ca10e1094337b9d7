"""`tune completion`: shell completion of commands, options, and names of recipes and configs, through argcomplete."""

import argparse
from collections.abc import Mapping
from functools import partial

import argcomplete
from argcomplete.completers import FilesCompleter
from argcomplete.shell_integration import shellcode

from tunekit.cli import registry


def main(args: argparse.Namespace) -> None:
    """Print the code for the shell to source. It calls `tune` each time the user presses Tab."""
    print(shellcode(["tune"], shell=args.shell))


def complete(parser: argparse.ArgumentParser, subparsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Answer the shell and end the process; returns at once if the shell has not asked."""
    recipes, configs = list(registry.list_recipes()), list(registry.list_configs())
    known = {"RECIPE": recipes, "CONFIG": configs, "CONFIG key=value": configs, "NAME": recipes + configs}
    for subparser in subparsers.values():
        for action in subparser._actions:  # argparse has no public list of them
            if names := known.get(str(action.metavar)):
                action.completer = partial(complete_name, names)  # pyright: ignore[reportAttributeAccessIssue]
    argcomplete.autocomplete(parser, always_complete_options=False)


def complete_name(names: list[str], prefix: str, **context: object) -> list[str]:
    """Names that ship with tunekit, or, if none begins with `prefix`, files of the user."""
    return [name for name in names if name.startswith(prefix)] or FilesCompleter()(prefix, **context)
