"""`tune cp`: a recipe or config of your own to edit."""

import argparse
import shlex
from pathlib import Path

from tunekit.cli import registry
from tunekit.errors import UserError


def main(args: argparse.Namespace) -> None:
    """Copy the file, never over another one unless forced to."""
    source = registry.find_recipe_or_config(args.name)
    dest = target(source, args.dest)
    if dest.exists() and not args.force:
        raise UserError(f"{dest} is there already: name another file, or overwrite it with --force")
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        dest.write_bytes(source.read_bytes())
    except OSError as error:
        raise UserError(f"cannot write {dest}: {error.strerror}") from error
    print(f"{dest}\nrun it: tune run {call(dest)}")


def call(path: Path) -> str:
    """What to type behind `tune run` for a file of one's own."""
    own = shlex.quote(str(path))
    return f"{own} CONFIG" if path.suffix == ".py" else f"{registry.recipe_of_config(path) or 'RECIPE'} {own}"


def target(source: Path, word: str) -> Path:
    """The file that `word` means: a folder takes the source's name, and a missing suffix is added."""
    dest = Path(word).expanduser()
    if dest.is_dir() or word.endswith("/"):
        return dest / source.name
    return dest if dest.suffix == source.suffix else dest.with_name(dest.name + source.suffix)
