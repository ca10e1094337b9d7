"""`tune selftest`: checks of this installation on this machine."""

import argparse
import os
import shutil
import sys
import textwrap
import time
from pathlib import Path

from tunekit.errors import UserError
from tunekit.kernels import cache_dir
from tunekit.selftest import report
from tunekit.selftest.checklist import ALWAYS, Check, select_checks
from tunekit.selftest.result import Outcome
from tunekit.selftest.runner import Runner

INDENT = 9 * " "  # of wrapped lines: below the name of the check
MIN_COLUMNS = 60


def main(args: argparse.Namespace) -> None:
    """Run the checks, print a table, write the report. Exits with 1 if a check fails."""
    checks = select_checks([*ALWAYS, *args.only] if args.only else [])
    json_file, markdown_file = report_files(args.output)
    print(f"{len(checks)} checks, up to 3 minutes; nothing is downloaded or sent\n", flush=True)
    start = time.monotonic()
    outcomes = run_checks(Runner(args.device, args.quick, print_outcome), checks)
    options = {"device": args.device, "quick": args.quick, "only": args.only}
    document = report.build_report(outcomes, options, time.monotonic() - start)
    try:
        report.write_report(document, json_file, markdown_file)
    except OSError as error:  # a full disk
        raise UserError(f"--output {args.output}: cannot write the report: {error.strerror}.") from error
    counts = ", ".join(f"{count} {status}" for status, count in document["counts"].items())
    print(f"\n{counts} in {document['seconds']:.0f} s; report: {json_file} and {markdown_file}")
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    for outcome in failed:
        print(f"failed: {outcome.check}: {outcome.detail}", file=sys.stderr)
    if failed:
        raise SystemExit(1)


def run_checks(runner: Runner, checks: list[Check]) -> list[Outcome]:
    """Run checks. After Ctrl-C, print that there is no report."""
    try:
        return runner.run(checks)
    except KeyboardInterrupt:
        done = f"{len(runner.outcomes)} of {len(checks)} checks"
        print(f"\ninterrupted after {done}: no report was written", file=sys.stderr)
        raise


def report_files(output: str) -> tuple[Path, Path]:
    """The JSON file and the Markdown file. UserError if they cannot be written: the checks take minutes."""
    path = Path(output).expanduser()
    if path.is_dir():
        raise UserError(f"--output {output}: this is a directory. Pass a file name.")
    if not path.parent.is_dir():
        raise UserError(f"--output {output}: {path.parent} is not a directory. Create it first.")
    stem = path.with_suffix("") if path.suffix in (".json", ".md") else path
    files = stem.with_name(f"{stem.name}.json"), stem.with_name(f"{stem.name}.md")
    for file in files:
        if file.is_dir() or (file.exists() and not os.access(file, os.W_OK)) or not cache_dir.is_writable(path.parent):
            raise UserError(f"--output {output}: cannot write {file}. Pass --output with a file in another directory.")
    return files


def print_outcome(outcome: Outcome) -> None:
    print(format_row(outcome, shutil.get_terminal_size().columns if sys.stdout.isatty() else None), flush=True)


def format_row(outcome: Outcome, columns: int | None) -> str:
    """A row of the table, wrapped to the width of a terminal. The figures at its end are the most interesting ones."""
    line = f"{outcome.status:8} {outcome.check:24} {outcome.seconds:6.1f} s  {outcome.detail}"
    if columns is None:
        return line
    return textwrap.fill(line, max(MIN_COLUMNS, columns), subsequent_indent=INDENT, break_on_hyphens=False)
