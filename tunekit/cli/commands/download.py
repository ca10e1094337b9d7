"""`tune download`: download a model from the Hub."""

import argparse
import sys
from pathlib import Path

from tunekit.errors import UserError
from tunekit.hub import download


def main(args: argparse.Namespace) -> None:
    """Download the files. Standard output is only the directory, for use in scripts."""
    repo, revision = download.split_repo_revision(args.repo) or (args.repo, None)
    if revision and args.revision:
        raise UserError(f"--revision: {args.repo} has a revision too. Remove one of them.")
    to = args.local_dir and Path(args.local_dir).expanduser()
    directory = download.download_repo(repo, args.revision or revision, file_patterns(args), to, args.token)
    files = [
        path for path in directory.rglob("*") if path.is_file() and ".cache" not in path.relative_to(directory).parts
    ]
    if not files:
        raise UserError(f"{args.repo}: no file matches --include and --exclude")
    size = sum(path.stat().st_size for path in files)
    print(f"{args.repo}: {len(files)} files, {size / 1e6:,.1f} MB", file=sys.stderr)
    print(directory)


def file_patterns(args: argparse.Namespace) -> download.Files:
    """File patterns: those of --include, or by default all files that tunekit reads, without those of --exclude."""
    if args.include:
        return download.Files(tuple(args.include), tuple(args.exclude))
    return download.Files(exclude=(*download.READ.exclude, *args.exclude))
