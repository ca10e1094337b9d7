"""`tune cp`: copy a recipe or config for editing."""

import argparse
import shlex
from pathlib import Path

from tunekit.cli import registry
from tunekit.errors import UserError


def main(args: argparse.Namespace) -> None:
    """Copy the file. Overwrites an existing file only with --force."""
    source = registry.find_recipe_or_config(args.name)
    dest = resolve_dest(source, args.dest)
    if dest.exists() and not args.force:
        raise UserError(f"{dest}: already exists. Choose another name, or pass --force to overwrite it")
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        dest.write_bytes(source.read_bytes())
    except OSError as error:
        raise UserError(f"cannot write {dest}: {error.strerror}") from error
    print(f"{dest}\nrun it: tune run {run_arguments(dest)}")


def run_arguments(path: Path) -> str:
    """Arguments of `tune run` for a local recipe or config."""
    quoted = shlex.quote(str(path))
    return f"{quoted} CONFIG" if path.suffix == ".py" else f"{registry.recipe_of_config(path) or 'RECIPE'} {quoted}"


def resolve_dest(source: Path, word: str) -> Path:
    """Path of the copy: in a directory, it has the name of the source; a missing suffix is added."""
    dest = Path(word).expanduser()
    if dest.is_dir() or word.endswith("/"):
        return dest / source.name
    return dest if dest.suffix == source.suffix else dest.with_name(dest.name + source.suffix)
