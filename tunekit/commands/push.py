"""`tune push`: what a run has learnt, or any model's folder, to the Hub."""

import argparse
from pathlib import Path

from tunekit import __version__, publish
from tunekit.errors import UserError
from tunekit.hub import push
from tunekit.hub.trouble import tell


def main(args: argparse.Namespace) -> None:
    """Send the files, and print the address alone on standard output, so that scripts can use it."""
    if args.pr and args.branch:
        raise UserError("--pr opens a branch of its own: leave --branch out")
    folder, ran = publish.result(args.folder)
    if not args.force:
        publish.refuse(folder, ran)
    files = publish.contents(folder)
    if args.dry_run:
        show(files)
        return
    target = push.Target(args.repo, args.private, args.branch, args.pr, args.token)
    pushed = push.push(files, target, args.message or f"Upload with tunekit {__version__}")
    tell(f"commit {pushed.commit}" if pushed.changed else f"nothing has changed since commit {pushed.commit}")
    print(pushed.url)


def show(files: dict[str, Path]) -> None:
    """What would be sent."""
    for path, file in files.items():
        print(f"{file.stat().st_size / 1e6:12,.2f} MB  {path}")
    print(f"{sum(file.stat().st_size for file in files.values()) / 1e6:12,.2f} MB  in {len(files)} files")
