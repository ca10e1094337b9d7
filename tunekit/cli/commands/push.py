"""`tune push`: what a run has learnt, or any model's folder, to the Hub."""

import argparse
from pathlib import Path

from tunekit import __version__
from tunekit.errors import UserError
from tunekit.hub import upload
from tunekit.hub.errors import print_line
from tunekit.publishing import publish


def main(args: argparse.Namespace) -> None:
    """Send the files, and print the address alone on standard output, so that scripts can use it."""
    if args.create_pr and args.revision:
        raise UserError("--create-pr: creates its own branch. Remove --revision")
    if args.merged_dir and not args.merge_adapter:
        raise UserError("--merged-dir: requires --merge-adapter")
    folder, ours = publish.find_result_dir(args.folder)
    doubtful = accept(folder, ours, args.force)
    if not args.merge_adapter:
        send(folder, doubtful, args)
    elif args.dry_run:
        raise UserError(
            "--dry-run: does not merge, so the files of --merge-adapter are unknown. Run `tune merge` first"
        )
    else:
        with publish.merged_dir(folder, args.merged_dir and Path(args.merged_dir).expanduser()) as whole:
            send(whole, accept(whole, True, args.force) or doubtful, args)


def accept(folder: Path, ours: bool, force: bool) -> bool:
    """Whether the files are doubtful; without force they are refused then."""
    why = publish.find_problem(folder, ours)
    if why is not None and not force:
        raise UserError(f"{why}; --force sends it all the same, and says so in the model card")
    return why is not None


def send(folder: Path, doubtful: bool, args: argparse.Namespace) -> None:
    """Send a folder, or show what would be sent."""
    publish.warn_local_base(folder)
    with publish.stage_files(folder, args.repo, doubtful, query_hub=not args.dry_run) as files:
        if args.dry_run:
            show(files)
            return
        target = upload.UploadTarget(args.repo, args.private, args.revision, args.create_pr, args.token)
        pushed = upload.upload_files(files, target, args.commit_message or f"Upload with tunekit {__version__}")
    print_line(f"commit {pushed.commit}" if pushed.changed else f"nothing has changed since commit {pushed.commit}")
    print(pushed.url)


def show(files: dict[str, Path]) -> None:
    """What would be sent."""
    for path, file in files.items():
        print(f"{file.stat().st_size / 1e6:12,.2f} MB  {path}")
    print(f"{sum(file.stat().st_size for file in files.values()) / 1e6:12,.2f} MB  in {len(files)} files")
