"""`tune cache`: prepared rows that are kept, and their end."""

import argparse
import re
import time
from pathlib import Path

from tunekit.data.preprocess import cache
from tunekit.errors import UserError
from tunekit.kernels import cache_dir
from tunekit.system import format_bytes

UNITS = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}
AGE = re.compile(r"(\d+)([mhdw])")
SHOWN = 8  # digits of a key: enough to tell entries apart


def main(args: argparse.Namespace) -> None:
    """List what is kept, or remove some of it."""
    place = cache.cache_dir()
    if place is None:
        raise UserError(f"{cache_dir.CACHE_VARIABLE}={cache.OFF}: prepared rows are not kept")
    if args.action == "clear":
        print(clear(args, place))
    elif args.keys or args.older_than or args.all:
        raise UserError("only `tune cache clear` takes keys, --older-than and --all")
    else:
        print(show(cache.list_entries(), cache.list_unfinished(), place))


def show(entries: list[cache.CacheEntry], halves: list[Path], place: Path) -> str:
    """A line for each entry, what was used last first."""
    head = ("key", "size", "rows", "tokens", "made", "used", "source")
    lines = [head, *map(line, entries)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(f"{word:{width}}" for word, width in zip(words, widths, strict=True)).rstrip() for words in lines]
    total = f"{format_bytes(sum(entry.size for entry in entries))} in {place}"
    if halves:
        total += f", and {format_bytes(sum(map(cache.dir_bytes, halves)))} in {len(halves)} unfinished"
    return "\n".join([*(text if entries else ["nothing is kept"]), total])


def line(entry: cache.CacheEntry) -> tuple[str, ...]:
    about = entry.metadata
    source = about["source"] if about["split"] == "train" else f"{about['source']} ({about['split']})"
    counts = f"{about['prepared']['rows']:,}", f"{about['tokens']:,}"
    return entry.key[:SHOWN], format_bytes(entry.size), *counts, ago(about["made"]), ago(entry.used), source


def ago(when: float) -> str:
    """How long ago, in the largest unit that it fills."""
    seconds = max(time.time() - when, 0)
    name = next((name for name in reversed(UNITS) if seconds >= UNITS[name]), None)
    return "now" if name is None else f"{seconds // UNITS[name]:.0f}{name} ago"


def clear(args: argparse.Namespace, place: Path) -> str:
    """Remove what is named, what was not used for a time, or all of it; not what is in use."""
    if not (args.keys or args.older_than or args.all):
        raise UserError("clear what? name keys of `tune cache`, or give --older-than 30d or --all")
    entries = cache.list_entries()
    chosen = [entry.path for entry in entries if args.all or entry.key in keys(args.keys, entries, place)]
    if args.older_than:
        before = time.time() - age(args.older_than)
        chosen += [entry.path for entry in entries if entry.used < before and entry.path not in chosen]
    chosen += cache.list_unfinished() if args.all or args.older_than else []
    sizes = {path: cache.dir_bytes(path) for path in chosen}
    gone = [path for path in chosen if cache.remove_entry(path)]
    left = f"; {len(chosen) - len(gone)} in use left" if len(gone) < len(chosen) else ""
    return f"removed {len(gone)}, {format_bytes(sum(sizes[path] for path in gone))}{left}"


def keys(words: list[str], entries: list[cache.CacheEntry], place: Path) -> set[str]:
    """Whole keys by their beginnings."""
    found = set()
    for word in words:
        fitting = [entry.key for entry in entries if entry.key.startswith(word)]
        if len(fitting) != 1:
            many = "several keys begin" if fitting else "no key begins"
            raise UserError(f"'{word}': {many} so in {place}; see `tune cache`")
        found.add(fitting[0])
    return found


def age(word: str) -> int:
    """Seconds of `30d`, `12h` and the like."""
    match = AGE.fullmatch(word)
    if match is None:
        raise UserError(f"--older-than: must be a number and m, h, d or w, such as 30d, got '{word}'")
    return int(match[1]) * UNITS[match[2]]
