"""`tune report`: write a web page with curves, facts and samples of runs."""

import argparse
import sys
from pathlib import Path

from tunekit.checkpoint.run_dir import REPORT
from tunekit.errors import UserError
from tunekit.report.page import write_report
from tunekit.report.run_files import read_run


def main(args: argparse.Namespace) -> None:
    """Write the page of one run into its directory, and that of several runs into the working directory."""
    print(f"written: {write_page(args)}", file=sys.stderr)


def write_page(args: argparse.Namespace) -> Path:
    """Write the page and return its file."""
    directories = [Path(directory) for directory in args.runs]
    file = Path(REPORT) if len(directories) > 1 else directories[0].expanduser() / REPORT
    file = Path(args.output).expanduser() if args.output else file
    if file.suffix not in (".html", ".htm"):
        raise UserError(f"--output {file}: the file name must end in .html. Use another name.")
    return write_report([read_run(directory) for directory in directories], file)
