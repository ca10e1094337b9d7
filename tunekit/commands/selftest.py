"""`tune selftest`: checks of this installation on this machine."""

import argparse
import shutil
import sys
import time
from pathlib import Path

from tunekit.errors import UserError
from tunekit.selftest import report
from tunekit.selftest.checklist import SYSTEM, Check, select_checks
from tunekit.selftest.result import Outcome
from tunekit.selftest.runner import Runner


def main(args: argparse.Namespace) -> None:
    """Run the checks, print a table, write the report. Exits with 1 if a check fails."""
    checks = select_checks([SYSTEM, *args.only] if args.only else [])
    json_file, markdown_file = report_files(args.output)
    print_header(checks)
    start = time.monotonic()
    outcomes = Runner(args.device, args.quick, print_outcome).run(checks)
    options = {"device": args.device, "quick": args.quick, "only": args.only}
    document = report.build(outcomes, options, time.monotonic() - start)
    report.write(document, json_file, markdown_file)
    counts = ", ".join(f"{count} {status}" for status, count in document["counts"].items())
    print(f"\n{counts} in {document['seconds']:.0f} s; report: {json_file} and {markdown_file}")
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    for outcome in failed:
        print(f"failed: {outcome.check}: {outcome.detail}", file=sys.stderr)
    if failed:
        raise SystemExit(1)


def report_files(output: str) -> tuple[Path, Path]:
    """The JSON file and the Markdown file. UserError if they cannot be written."""
    path = Path(output)
    if path.is_dir():
        raise UserError(f"--output {output}: this is a directory. Pass a file name")
    if not path.parent.is_dir():
        raise UserError(f"--output {output}: {path.parent} is no directory. Create it first")
    return path.with_suffix(".json"), path.with_suffix(".md")


def print_header(checks: list[Check]) -> None:
    print(f"{len(checks)} checks, up to 3 minutes; nothing is downloaded or sent\n", flush=True)


def print_outcome(outcome: Outcome) -> None:
    """A row of the table, as wide as the terminal."""
    line = f"{outcome.status:8} {outcome.check:24} {outcome.seconds:6.1f} s  {outcome.detail}"
    print(line[: shutil.get_terminal_size().columns] if sys.stdout.isatty() else line, flush=True)
