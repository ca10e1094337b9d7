"""`tune cp`: a recipe or config of your own to edit."""

import argparse
import shlex
from pathlib import Path

from tunekit import catalog
from tunekit.errors import UserError


def main(args: argparse.Namespace) -> None:
    """Copy the file, never over another one unless forced to."""
    source = catalog.either(args.name)
    dest = target(source, args.dest)
    if dest.exists() and not args.force:
        raise UserError(f"{dest} is there already: name another file, or overwrite it with --force")
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        dest.write_bytes(source.read_bytes())
    except OSError as error:
        raise UserError(f"cannot write {dest}: {error.strerror}") from error
    print(dest)
    recipe = catalog.written_for(source) if source.suffix == ".yaml" else None
    if recipe:
        print(f"run it: tune run {recipe} {shlex.quote(str(dest))}")


def target(source: Path, word: str) -> Path:
    """The file that `word` means: a folder takes the source's name, and a missing suffix is added."""
    dest = Path(word).expanduser()
    if dest.is_dir() or word.endswith("/"):
        return dest / source.name
    return dest if dest.suffix == source.suffix else dest.with_name(dest.name + source.suffix)
