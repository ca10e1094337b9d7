"""`tune push`: upload the result of a run, or the directory of a model, to the Hub."""

import argparse
from pathlib import Path

from tunekit import __version__
from tunekit.errors import UserError
from tunekit.hub import upload
from tunekit.hub.errors import print_line
from tunekit.publishing import publish


def main(args: argparse.Namespace) -> None:
    """Upload the files. Standard output is only the URL, for use in scripts."""
    if (url := upload_result(args)) is not None:
        print(url)


def upload_result(args: argparse.Namespace) -> str | None:
    """Upload the files, and return the URL; None after a dry run."""
    if args.create_pr and args.revision:
        raise UserError("--create-pr: creates its own branch. Remove --revision")
    if args.merged_dir and not args.merge_adapter:
        raise UserError("--merged-dir: requires --merge-adapter")
    folder, ours = publish.find_result_dir(args.folder)
    unverified = check_verified(folder, ours, args.force)
    if not args.merge_adapter:
        return push_folder(folder, unverified, args)
    if args.dry_run:
        raise UserError(
            "--dry-run: does not merge, so the files of --merge-adapter are unknown. Run `tune merge` first"
        )
    with publish.merged_dir(folder, args.merged_dir and Path(args.merged_dir).expanduser()) as merged:
        return push_folder(merged, check_verified(merged, True, args.force) or unverified, args)


def check_verified(folder: Path, ours: bool, force: bool) -> bool:
    """Return whether the files are unverified. Raise UserError if they are and `force` is not set."""
    problem = publish.find_problem(folder, ours)
    if problem is not None and not force:
        raise UserError(f"{problem}. Pass --force to upload it anyway; the model card will state this")
    return problem is not None


def push_folder(folder: Path, unverified: bool, args: argparse.Namespace) -> str | None:
    """Upload a directory, and return its URL. In a dry run, print its files."""
    publish.warn_local_base(folder)
    with publish.stage_files(folder, args.repo, unverified, query_hub=not args.dry_run) as files:
        if args.dry_run:
            print_files(files)
            return None
        target = upload.UploadTarget(args.repo, args.private, args.revision, args.create_pr, args.token)
        result = upload.upload_files(files, target, args.commit_message or f"Upload with tunekit {__version__}")
    print_line(f"commit {result.commit}" if result.changed else f"nothing has changed since commit {result.commit}")
    return result.url


def print_files(files: dict[str, Path]) -> None:
    """Print the sizes and paths of the files to upload."""
    for path, file in files.items():
        print(f"{file.stat().st_size / 1e6:12,.2f} MB  {path}")
    print(f"{sum(file.stat().st_size for file in files.values()) / 1e6:12,.2f} MB  in {len(files)} files")
