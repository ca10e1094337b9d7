"""`tune data`: what a config will train on, and what is wrong with it. No weights are read and no run begins."""

import argparse
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunekit import catalog, launch
from tunekit.config.load import load
from tunekit.errors import UserError
from tunekit.look import page, terminal
from tunekit.look.inspection import subjects
from tunekit.look.view import View, look

FEW, MORE = 3, 30  # rows in a terminal and on a page


def main(args: argparse.Namespace) -> None:
    """Show the data; UserError if nothing useful can come of training on it."""
    usual = FEW if args.html is None else MORE
    rows = args.row or (usual if args.rows is None else args.rows)
    view = look(*config(args), rows, subjects)
    if args.json:
        print(json.dumps(view.plain(), indent=2, ensure_ascii=False))
    else:
        rows = view.rows if args.row or args.rows is not None else view.rows[:FEW]
        show(replace(view, rows=rows), screen(args.plain), whole=bool(args.row))
    if args.html:
        write(Path(args.html).expanduser(), view, args.config)
    if wrong := [finding for finding in view.findings if finding.severity == "wrong"]:
        raise UserError(f"this data cannot be trained on: {wrong[0]}")


def config(args: argparse.Namespace) -> tuple[Any, Any]:
    """The recipe that a config is for, and the config. Of the model only words are wanted: no more of it is checked."""
    path = catalog.config(args.config)
    name = args.recipe or catalog.written_for(path)
    if name is None:
        raise UserError(f"{path} names no recipe: add a line such as 'recipe: sft', or say --recipe sft")
    recipe = launch.recipe(name)
    return recipe, load(recipe.RECIPE, path, args.overrides, [Path(file) for file in args.imports])


def screen(plain: bool) -> terminal.Screen:
    """The terminal. What is no terminal gets no colours, and lines of 120 columns."""
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb" and not plain
    return terminal.Screen(max(shutil.get_terminal_size((120, 24)).columns, 20), coloured)


def show(view: View, screen: terminal.Screen, whole: bool) -> None:
    for figures in view.figures:
        print("\n".join(terminal.figures(figures, screen)))
    for shown in view.rows:
        print("\n".join(terminal.row(shown, view.tokenizer, screen, whole)))
    if view.rows:
        print(terminal.legend(screen), end="\n\n")
    print("\n".join(terminal.findings(view.findings, screen)))


def write(path: Path, view: View, title: str) -> None:
    if path.suffix not in (".html", ".htm"):
        raise UserError(f"--html {path}: name a file that ends in .html")
    try:
        path.write_text(page.html(view, title), "utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    print(f"written: {path}", file=sys.stderr)
