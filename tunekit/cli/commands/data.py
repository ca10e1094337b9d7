"""`tune data`: what a config will train on, and what is wrong with it. No weights are read and no run begins."""

import argparse
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunekit.cli import recipe_loader, registry
from tunekit.config.load import load_config
from tunekit.data.inspect import html_report, terminal
from tunekit.data.inspect.report import DataReport, build_report
from tunekit.errors import UserError
from tunekit.training.data_checks import check_targets

FEW, MORE = 3, 30  # rows in a terminal and on a page


def main(args: argparse.Namespace) -> None:
    """Show the data; UserError if nothing useful can come of training on it."""
    usual = FEW if args.html is None else MORE
    rows = args.row or (usual if args.num_rows is None else args.num_rows)
    view = build_report(read_config(args), rows, check_targets)
    if args.json:
        print(json.dumps(view.to_dict(), indent=2, ensure_ascii=False))
    else:
        rows = view.rows if args.row or args.num_rows is not None else view.rows[:FEW]
        show(replace(view, rows=rows), screen(args.no_color), whole=bool(args.row))
    if args.html:
        write(Path(args.html).expanduser(), view, args.config)
    if wrong := [finding for finding in view.findings if finding.severity == "wrong"]:
        raise UserError(f"this data cannot be trained on: {wrong[0]}")


def read_config(args: argparse.Namespace) -> Any:
    """The config, without the checks that need the model: only its tokenizer is used."""
    path = registry.find_config(args.config)
    name = args.recipe or registry.recipe_of_config(path)
    if name is None:
        raise UserError(f"{path} names no recipe: add a line such as 'recipe: sft', or say --recipe sft")
    recipe = recipe_loader.load_recipe(name)
    return load_config(recipe.CONFIG, path, args.overrides, [Path(file) for file in args.imports])


def screen(plain: bool) -> terminal.TerminalSize:
    """The terminal. What is no terminal gets no colours, and lines of 120 columns."""
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb" and not plain
    return terminal.TerminalSize(max(shutil.get_terminal_size((120, 24)).columns, 20), coloured)


def show(view: DataReport, screen: terminal.TerminalSize, whole: bool) -> None:
    for figures in view.stats:
        print("\n".join(terminal.format_stats(figures, screen)))
    for shown in view.rows:
        print("\n".join(terminal.format_row(shown, view.tokenizer, screen, whole)))
    if view.rows:
        print(terminal.format_legend(screen), end="\n\n")
    print("\n".join(terminal.format_findings(view.findings, screen)))


def write(path: Path, view: DataReport, title: str) -> None:
    if path.suffix not in (".html", ".htm"):
        raise UserError(f"--html {path}: name a file that ends in .html")
    try:
        path.write_text(html_report.render_html(view, title), "utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    print(f"written: {path}", file=sys.stderr)
