"""`tune cp`: copy a recipe, a config or the training loop for editing."""

import argparse
import shlex
from pathlib import Path

from tunekit.cli import registry
from tunekit.config.yaml_parser import read_recipe
from tunekit.errors import UserError


def main(args: argparse.Namespace) -> None:
    """Copy the file. Overwrites an existing file only with --force."""
    source = registry.find_source(args.name)
    dest = resolve_dest(source, args.dest)
    if dest.exists() and not args.force:
        raise UserError(f"{dest}: already exists. Choose another name, or pass --force to overwrite it")
    hint = usage_hint(source, dest)  # before anything is written: the config may be malformed
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        dest.write_bytes(source.read_bytes())
    except OSError as error:
        raise UserError(f"cannot write {dest}: {error.strerror}") from error
    print(f"{dest}\n{hint}")


def usage_hint(source: Path, dest: Path) -> str:
    """How to use the copy of a file."""
    if source == registry.TRAIN_LOOP:
        return f"import it in a copy of a recipe in the same directory: from {dest.stem} import TrainLoop"
    quoted = shlex.quote(str(dest))
    arguments = f"{quoted} CONFIG" if source.suffix == ".py" else f"{read_recipe(source) or 'RECIPE'} {quoted}"
    return f"run it: tune run {arguments}"


def resolve_dest(source: Path, word: str) -> Path:
    """Path of the copy: in a directory, it has the name of the source; a missing suffix is added."""
    dest = Path(word).expanduser()
    if dest.is_dir() or word.endswith("/"):
        return dest / source.name
    return dest if dest.suffix == source.suffix else dest.with_name(dest.name + source.suffix)
