"""`tune download`: a model of the Hub, on this disk."""

import argparse
import sys
from pathlib import Path

from tunekit.errors import UserError
from tunekit.hub import download


def main(args: argparse.Namespace) -> None:
    """Fetch the files, and print the folder alone on standard output, so that scripts can use it."""
    place = download.download_repo(
        args.repo, args.revision, wanted(args), args.local_dir and Path(args.local_dir).expanduser(), args.token
    )
    files = [path for path in place.rglob("*") if path.is_file() and ".cache" not in path.relative_to(place).parts]
    if not files:
        raise UserError(f"{args.repo} has no such file: nothing came; --include and --exclude choose by globs")
    size = sum(path.stat().st_size for path in files)
    print(f"{args.repo}: {len(files)} files, {size / 1e6:,.1f} MB", file=sys.stderr)
    print(place)


def wanted(args: argparse.Namespace) -> download.Files:
    """What the toolkit reads, less what is excluded; or just what is included."""
    if args.include:
        return download.Files(tuple(args.include), tuple(args.exclude))
    return download.Files(exclude=(*download.READ.exclude, *args.exclude))
