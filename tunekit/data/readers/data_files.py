"""Selection of the data files of a split in a directory, or of a glob pattern. A function lists remote directories."""

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

from tunekit.errors import UserError

TEXT_SUFFIXES, COLUMNAR_SUFFIXES = (".json", ".jsonl", ".csv"), (".parquet", ".arrow")
COMPRESSED_SUFFIXES = (".gz", ".zst")  # for text formats only; columnar formats compress internally
SUFFIXES = (*TEXT_SUFFIXES, *COLUMNAR_SUFFIXES)
SPLIT_NAMES = ("train", "test", "validation", "valid", "val", "dev", "eval", "heldout")
# Files that `datasets` writes next to the rows: metadata, and caches of transforms.
METADATA_FILES = re.compile(r"\..*|dataset_dict\.json|dataset_infos?\.json|state\.json|cache-.*\.arrow")
MAGIC = re.compile(r"[*?[]")
MAX_ENTRIES = 50_000  # files and directories among which the matches of a pattern are searched, in about a second


class DirEntry(NamedTuple):
    """A file or directory in a directory. `path` is its full path or URL."""

    path: str
    is_dir: bool
    is_link: bool = False

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    @property
    def split(self) -> str:
        """Split by its name: `test` for `test.jsonl`, `test-00000-of-00002.parquet`, or a directory `test`."""
        return self.name if self.is_dir else re.split(r"[-_.]", self.name)[0]


def file_format(name: str) -> str:
    """Return the suffix of the data format, without compression (`.jsonl` for `rows.jsonl.gz`); '' if unsupported."""
    path = PurePosixPath(name)
    if path.suffix in COMPRESSED_SUFFIXES:
        path = path.with_suffix("")
        return path.suffix if path.suffix in TEXT_SUFFIXES else ""
    return path.suffix if path.suffix in SUFFIXES else ""


def is_row_file(entry: DirEntry) -> bool:
    return not entry.is_dir and file_format(entry.name) != "" and METADATA_FILES.fullmatch(entry.name) is None


def files_in_dir(directory: str, split: str, list_dir: Callable[[str], Iterable[DirEntry]]) -> list[str]:
    """Return the data files of a split: by file name, or by the name of their directory.

    If no file is named after a split, all files are `train`. A directory without data files may have one directory per
    split, as `datasets` saves them, or a directory `data`.
    """
    entries = sorted(list_dir(directory))
    files = [entry for entry in entries if is_row_file(entry)]
    directories = [entry for entry in entries if entry.is_dir and not entry.name.startswith(".")]
    candidates = files or [entry for entry in directories if entry.split in (*SPLIT_NAMES, split)]
    if not candidates:
        data_dirs = [entry.path for entry in directories if entry.name == "data"]
        if data_dirs:
            return files_in_dir(data_dirs[0], split, list_dir)
        raise UserError(
            f"{directory}: no {', '.join(SUFFIXES)} files in this directory{subdirectory_hint(directories)}"
        )
    split_names = sorted({entry.split for entry in candidates} & {*SPLIT_NAMES, split})
    matches = [entry for entry in candidates if entry.split == split] if split_names else candidates
    if not matches or (not split_names and split != "train"):
        raise UserError(f"{directory}: no split {split!r}. Available splits: {', '.join(split_names) or 'train'}.")
    paths: list[str] = []
    for match in matches:
        split_files = (
            [entry for entry in sorted(list_dir(match.path)) if is_row_file(entry)] if match.is_dir else [match]
        )
        if not split_files:
            raise UserError(f"{match.path}: no {', '.join(SUFFIXES)} files in this directory")
        paths += [entry.path for entry in split_files]
    return paths


def subdirectory_hint(directories: list[DirEntry]) -> str:
    """Format the names of subdirectories for an error message."""
    if not directories:
        return ""
    names = [entry.name for entry in directories]
    suffix = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f". Set `source` to one of its subdirectories: {', '.join(names[:5])}{suffix}."


def is_glob(source: str) -> bool:
    """Whether a source is a glob pattern. HTTP URLs are not: `?` starts their query."""
    return not source.startswith(("http://", "https://")) and MAGIC.search(source) is not None


def files_matching(
    name: str, pattern: str, list_dir: Callable[[str], Iterable[DirEntry]], entries_per_dir: int = 1
) -> list[str]:
    """Return the data files that a glob pattern matches. A part `**` is any number of directories, except links.

    `name` is the pattern in messages. Raise UserError after MAX_ENTRIES entries; listing a directory counts as
    `entries_per_dir`, because remote ones are slow to list.
    """
    magic = MAGIC.search(pattern)
    start = pattern.rfind("/", 0, magic.start() if magic else None) + 1
    parts = tuple(part for part in pattern[start:].split("/") if part not in ("", "."))
    files, num_entries, root = [], 0, pattern[:start]
    pending = [(root, {parts if parts[-1:] != ("**",) else (*parts, "*")})]
    while pending:
        directory, patterns = pending.pop()
        num_entries += entries_per_dir
        for entry in list_readable(directory, list_dir, is_root=directory is root):
            num_entries += 1
            if num_entries > MAX_ENTRIES:
                problem = f"this pattern searches more than {MAX_ENTRIES:,} files and directories"
                raise UserError(f"{name}: {problem}. Set `source` to a pattern that starts with more directories.")
            rest = match_entry(entry, patterns)
            if entry.is_dir and rest:
                pending.append((entry.path, rest))
            elif () in rest and is_row_file(entry):
                files.append(entry.path)
    if not files:
        raise UserError(f"{name}: no {', '.join(SUFFIXES)} file matches")
    return sorted(files)


def list_readable(directory: str, list_dir: Callable[[str], Iterable[DirEntry]], is_root: bool) -> Iterator[DirEntry]:
    """Entries of a directory; none if it is unreadable or was removed, except for the root of a search."""
    try:
        yield from list_dir(directory)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        if is_root:
            raise


def match_entry(entry: DirEntry, patterns: set[tuple[str, ...]]) -> set[tuple[str, ...]]:
    """Return what remains of each pattern that the name of an entry matches."""
    remaining = set()
    for parts in patterns:
        first = next((index for index, part in enumerate(parts) if part != "**"), len(parts))
        if first > 0 and entry.is_dir and not entry.is_link:
            remaining.add(parts[first - 1 :])
        if parts[first:] and fnmatch.fnmatchcase(entry.name, parts[first]):
            remaining.add(parts[first + 1 :])
    return remaining - ({()} if entry.is_dir else set())


def check_row_file(path: str) -> None:
    """Raise UserError if the format of a file is not supported."""
    if not file_format(path):
        suffix = PurePosixPath(path).suffix or "no suffix"
        raise UserError(f"{path}: unsupported file format, must be one of {', '.join(SUFFIXES)}, got {suffix}")


def check_train_split(source: str, split: str) -> None:
    """Raise UserError for any split but `train`. For files and glob patterns, which have no other splits."""
    if split != "train":
        hint = "Slice it, as in train[90%:], or set another `source`."
        raise UserError(f"{source}: a file has only the split 'train', got {split!r}. {hint}")
