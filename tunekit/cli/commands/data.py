"""`tune data`: inspect and check the training data of a config. Loads no weights and starts no run."""

import argparse
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunekit.cli import recipe_loader
from tunekit.config.load import load_config
from tunekit.data.inspect import html_report, terminal
from tunekit.data.inspect.report import DataReport, build_report
from tunekit.errors import UserError
from tunekit.training.data_checks import check_targets

TERMINAL_ROWS, HTML_ROWS = 3, 30  # default number of rows


def main(args: argparse.Namespace) -> None:
    """Print a report of the data. Raise UserError if a check finds an error in it."""
    default = TERMINAL_ROWS if args.html is None else HTML_ROWS
    rows = args.row or (default if args.num_rows is None else args.num_rows)
    view = build_report(read_config(args), rows, check_targets)
    if args.json:
        print(json.dumps(view.to_dict(), indent=2, ensure_ascii=False))
    else:
        rows = view.rows if args.row or args.num_rows is not None else view.rows[:TERMINAL_ROWS]
        print_examples(replace(view, rows=rows), terminal_size(args.no_color), full=bool(args.row))
    if args.html:
        write_report(Path(args.html).expanduser(), view, args.config)
    if errors := [finding for finding in view.findings if finding.severity == "wrong"]:
        raise UserError(f"not usable for training: {errors[0]}")


def read_config(args: argparse.Namespace) -> Any:
    """Load the config without the checks that need the model. Only its tokenizer is used."""
    path, name = recipe_loader.find_config_and_recipe(args)
    recipe = recipe_loader.load_recipe(name)
    return load_config(recipe.CONFIG, path, args.overrides, [Path(file) for file in args.imports])


def terminal_size(no_color: bool) -> terminal.TerminalSize:
    """Width and color support of the terminal. Files and pipes get 120 columns and no color."""
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb" and not no_color
    return terminal.TerminalSize(max(shutil.get_terminal_size((120, 24)).columns, 20), color)


def print_examples(view: DataReport, screen: terminal.TerminalSize, full: bool) -> None:
    for stats in view.stats:
        print("\n".join(terminal.format_stats(stats, screen)))
    for row in view.rows:
        print("\n".join(terminal.format_row(row, view.tokenizer, screen, full)))
    if view.rows:
        print(terminal.format_legend(screen), end="\n\n")
    print("\n".join(terminal.format_findings(view.findings, screen)))


def write_report(path: Path, view: DataReport, title: str) -> None:
    if path.suffix not in (".html", ".htm"):
        raise UserError(f"--html {path}: the file name must end in .html")
    try:
        path.write_text(html_report.render_html(view, title), "utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    print(f"written: {path}", file=sys.stderr)
