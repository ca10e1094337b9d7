"""`tune import`: write a config from a config or a command line of another trainer."""

import argparse
import shlex
import sys
from collections.abc import Collection
from pathlib import Path

from tunekit.checkpoint import atomic
from tunekit.cli import recipe_loader
from tunekit.config.load import load_config
from tunekit.errors import UserError
from tunekit.importers import imported
from tunekit.importers.imported import Imported
from tunekit.importers.report import format_findings

SUFFIXES = (".yaml", ".yml", ".json")


def main(args: argparse.Namespace) -> None:
    """Write the config to a file or to the standard output, and say what did not map."""
    if "--" in args.words:
        words = args.words[args.words.index("--") + 1 :]
        write(import_command(words, args.gpus), args)
    elif args.source is None:
        raise UserError("missing FILE. Usage: tune import FILE, or tune import -- trl sft --model_name_or_path ...")
    elif Path(args.source).is_dir():
        import_directory(Path(args.source), args)
    else:
        if not Path(args.source).is_file():
            raise UserError(f"{args.source}: no such file. Pass a config file, a directory, or -- and a command line")
        write(import_file(Path(args.source), args), args)


def import_file(path: Path, args: argparse.Namespace) -> Imported:
    return imported.import_file(path, args.overrides, args.trainer, args.gpus, recipe_loader.keys_of_recipe)


def import_command(words: Collection[str], num_devices: int | None) -> Imported:
    return imported.import_command([*words], num_devices, recipe_loader.keys_of_recipe)


def import_directory(directory: Path, args: argparse.Namespace) -> None:
    """Import all configs of a directory to `--output`, with the same names. Files that are refused are listed."""
    if args.output is None:
        raise UserError(f"{directory}: a directory needs a directory for the results. Pass --output DIR")
    refused, count = [], 0
    for path in sorted(path for path in directory.rglob("*") if path.suffix in SUFFIXES and path.is_file()):
        target = Path(args.output) / path.relative_to(directory).with_suffix(".yaml")
        try:
            write_file(import_file(path, args), target, args.force)
            count += 1
        except UserError as error:
            refused.append(str(error) if str(path) in str(error) else f"{path}: {error}")
    if not count and not refused:
        raise UserError(f"{directory}: has no YAML or JSON files. Pass the directory of the configs")
    print(f"imported: {count} files to {args.output}" + (f"; refused: {len(refused)}" if refused else ""))
    if refused:
        raise UserError("\n".join(refused))


def write(result: Imported, args: argparse.Namespace) -> None:
    if args.output is None:
        check(result)
        print(result.text, end="")
        print_findings(result)
    else:
        write_file(result, Path(args.output), args.force)


def write_file(result: Imported, target: Path, force: bool) -> None:
    """Write a config, say what did not map, and how it is run."""
    if target.exists() and not force:
        raise UserError(f"{target}: already exists. Pass --force to overwrite it, or another --output")
    check(result)
    target.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_text_atomic(target, result.text)
    print_findings(result)
    command = shlex.join(["tune", "run", str(target), *result.draft.launch])
    print(f"written: {target}\nrun it: {command}", file=sys.stderr)


def print_findings(result: Imported) -> None:
    if text := format_findings(result.draft.findings):
        print(text, file=sys.stderr)


def check(result: Imported) -> None:
    """Raise ConfigError if the keys and values are not those of the recipe. Models and data are not accessed."""
    load_config(recipe_loader.load_recipe(result.draft.recipe).CONFIG, result.text)
