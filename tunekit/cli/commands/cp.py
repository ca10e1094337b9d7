"""`tune cp`: copy a recipe or config for editing."""

import argparse
import shlex
from pathlib import Path

from tunekit.cli import registry
from tunekit.config.yaml_parser import read_recipe
from tunekit.errors import UserError


def main(args: argparse.Namespace) -> None:
    """Copy the file. Overwrites an existing file only with --force."""
    source = registry.find_recipe_or_config(args.name)
    dest = resolve_dest(source, args.dest)
    if dest.exists() and not args.force:
        raise UserError(f"{dest}: already exists. Choose another name, or pass --force to overwrite it")
    arguments = run_arguments(source, dest)  # before anything is written: the config may be malformed
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        dest.write_bytes(source.read_bytes())
    except OSError as error:
        raise UserError(f"cannot write {dest}: {error.strerror}") from error
    print(f"{dest}\nrun it: tune run {arguments}")


def run_arguments(source: Path, dest: Path) -> str:
    """Arguments of `tune run` for the copy of a recipe or config."""
    quoted = shlex.quote(str(dest))
    return f"{quoted} CONFIG" if source.suffix == ".py" else f"{read_recipe(source) or 'RECIPE'} {quoted}"


def resolve_dest(source: Path, word: str) -> Path:
    """Path of the copy: in a directory, it has the name of the source; a missing suffix is added."""
    dest = Path(word).expanduser()
    if dest.is_dir() or word.endswith("/"):
        return dest / source.name
    return dest if dest.suffix == source.suffix else dest.with_name(dest.name + source.suffix)
