"""`tune watch`: follow a run on the terminal until it ends, or in a browser."""

import argparse
import os
import shutil
import sys
from pathlib import Path

from tunekit.report.progress import ScreenSize, format_screen, poll_run, watch_lines
from tunekit.report.server import ReportServer

CLEAR, HOME, END_OF_LINE, BELOW = "\x1b[2J", "\x1b[H", "\x1b[K", "\x1b[J"


def main(args: argparse.Namespace) -> None:
    """Show the progress of a run. With `--port`, serve its report until Ctrl-C."""
    directory = Path(args.run).expanduser()
    if args.port is not None:
        serve(directory, args.port)
    elif sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        show_screens(directory)
    else:
        watch_lines(directory, sys.stdout)


def serve(directory: Path, port: int) -> None:
    with ReportServer(directory, port) as server:
        print(f"{directory}: report at {server.url}; Ctrl-C ends the server", file=sys.stderr, flush=True)
        server.serve_forever()


def show_screens(directory: Path) -> None:
    """Draw the screen again after each change."""
    start = CLEAR
    for run in poll_run(directory):
        size = shutil.get_terminal_size((80, 24))
        lines = format_screen(run, ScreenSize(max(size.columns, 20), max(size.lines, 6)))
        print(start + HOME + "".join(f"{line}{END_OF_LINE}\n" for line in lines) + BELOW, end="", flush=True)
        start = ""
