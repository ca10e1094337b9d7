"""`tune episodes`: write a web page to read sampled episodes turn by turn."""

import argparse
import json
import sys
from collections import deque
from pathlib import Path
from typing import Any

from tunekit.checkpoint.atomic import write_text_atomic
from tunekit.errors import UserError
from tunekit.rollouts.episode_page import EPISODE_KEYS, render_episodes

NAME = "episodes.jsonl"


def main(args: argparse.Namespace) -> None:
    """Write the page of the last episodes of a file, or of a run directory."""
    path = Path(args.file)
    path = path / NAME if path.is_dir() else path
    page = Path(args.html)
    if page.suffix not in (".html", ".htm"):
        raise UserError(f"--html {page}: the file name must end in .html")
    records = read_records(path, args.num_rows)
    write_text_atomic(page, render_episodes(records, str(path)))
    print(f"written: {page} ({len(records)} episodes)", file=sys.stderr)


def read_records(path: Path, count: int) -> list[dict[str, Any]]:
    """The last `count` lines of a file of episodes."""
    try:
        with path.open(encoding="utf-8") as file:
            lines = deque(enumerate(file, 1), count)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason}). Save it as UTF-8.") from None
    except OSError as error:
        hint = "Name a file that a recipe wrote to episodes_path."
        raise UserError(f"{path}: cannot be read: {error.strerror}. {hint}") from None
    return [parse_record(line, f"{path}:{number}") for number, line in lines]


def parse_record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON: {error}. Name a file of episodes.") from None
    if not isinstance(record, dict) or not record.keys() >= EPISODE_KEYS:
        raise UserError(f"{where}: not an episode. Name a file that a recipe wrote to episodes_path.")
    return record
