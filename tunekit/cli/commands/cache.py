"""`tune cache`: show or clear the cache of tokenized rows."""

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
KEY_DIGITS = 8  # displayed digits of a key, enough to be unique


def main(args: argparse.Namespace) -> None:
    """List entries of the cache, or remove them."""
    directory = cache.cache_dir()
    if directory is None:
        raise UserError(f"{cache_dir.CACHE_VARIABLE}={cache.OFF}: the cache is disabled")
    if args.action == "clear":
        print(clear_entries(args, directory))
    elif args.keys or args.older_than or args.all:
        raise UserError("keys, --older-than and --all require `tune cache clear`")
    else:
        print(print_entries(cache.list_entries(), cache.list_unfinished(), directory))


def print_entries(entries: list[cache.CacheEntry], unfinished: list[Path], directory: Path) -> str:
    """Table of the entries, most recently used first."""
    head = ("key", "size", "rows", "tokens", "made", "used", "source")
    lines = [head, *map(entry_row, entries)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(f"{word:{width}}" for word, width in zip(words, widths, strict=True)).rstrip() for words in lines]
    total = f"{format_bytes(sum(entry.size for entry in entries))} in {directory}"
    if unfinished:
        total += f", and {format_bytes(sum(map(cache.dir_bytes, unfinished)))} in {len(unfinished)} unfinished"
    return "\n".join([*(text if entries else ["the cache is empty"]), total])


def entry_row(entry: cache.CacheEntry) -> tuple[str, ...]:
    metadata = entry.metadata
    source = metadata["source"] if metadata["split"] == "train" else f"{metadata['source']} ({metadata['split']})"
    counts = f"{metadata['prepared']['rows']:,}", f"{metadata['tokens']:,}"
    return (
        entry.key[:KEY_DIGITS],
        format_bytes(entry.size),
        *counts,
        format_age(metadata["made"]),
        format_age(entry.used),
        source,
    )


def format_age(when: float) -> str:
    """Format the time since `when` in the largest unit that is not below 1."""
    seconds = max(time.time() - when, 0)
    name = next((name for name in reversed(UNITS) if seconds >= UNITS[name]), None)
    return "now" if name is None else f"{seconds // UNITS[name]:.0f}{name} ago"


def clear_entries(args: argparse.Namespace, directory: Path) -> str:
    """Remove the selected entries. Entries in use are not removed."""
    if not (args.keys or args.older_than or args.all):
        raise UserError("missing entries. Pass keys from `tune cache`, --older-than 30d, or --all")
    entries = cache.list_entries()
    selected = [entry.path for entry in entries if args.all or entry.key in resolve_keys(args.keys, entries, directory)]
    if args.older_than:
        before = time.time() - parse_age(args.older_than)
        selected += [entry.path for entry in entries if entry.used < before and entry.path not in selected]
    selected += cache.list_unfinished() if args.all or args.older_than else []
    sizes = {path: cache.dir_bytes(path) for path in selected}
    removed = [path for path in selected if cache.remove_entry(path)]
    in_use_text = f"; {len(selected) - len(removed)} in use not removed" if len(removed) < len(selected) else ""
    return f"removed {len(removed)}, {format_bytes(sum(sizes[path] for path in removed))}{in_use_text}"


def resolve_keys(prefixes: list[str], entries: list[cache.CacheEntry], directory: Path) -> set[str]:
    """Expand unique prefixes to full keys."""
    full_keys = set()
    for prefix in prefixes:
        matches = [entry.key for entry in entries if entry.key.startswith(prefix)]
        if len(matches) != 1:
            problem = f"matches {len(matches)} keys" if matches else "matches no key"
            raise UserError(f"'{prefix}': {problem} in {directory}. List keys with: tune cache")
        full_keys.add(matches[0])
    return full_keys


def parse_age(word: str) -> int:
    """Parse an age such as `30d` or `12h` to seconds."""
    match = AGE.fullmatch(word)
    if match is None:
        raise UserError(f"--older-than: must be a number and m, h, d or w, such as 30d, got '{word}'")
    return int(match[1]) * UNITS[match[2]]
