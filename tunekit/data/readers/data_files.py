"""Selection of the data files of a split in a directory. A function lists directories, which may be remote."""

import re
from collections.abc import Callable, Iterable
from pathlib import PurePosixPath
from typing import NamedTuple

from tunekit.errors import UserError

TEXT_SUFFIXES, COLUMNAR_SUFFIXES = (".json", ".jsonl", ".csv"), (".parquet", ".arrow")
COMPRESSED_SUFFIXES = (".gz", ".zst")  # for text formats only; columnar formats compress internally
SUFFIXES = (*TEXT_SUFFIXES, *COLUMNAR_SUFFIXES)
SPLIT_NAMES = ("train", "test", "validation", "valid", "val", "dev", "eval", "heldout")
# Files that `datasets` writes next to the rows: metadata, and caches of transforms.
METADATA_FILES = re.compile(r"\..*|dataset_dict\.json|dataset_infos?\.json|state\.json|cache-.*\.arrow")


class DirEntry(NamedTuple):
    """A file or directory in a directory. `path` is its full path or URL."""

    path: str
    is_dir: bool

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
    return not source.startswith(("http://", "https://")) and any(character in source for character in "*?[")


def files_matching(pattern: str, paths: Iterable[str]) -> list[str]:
    """Return the data files among the paths that a glob pattern matches."""
    matches = sorted(path for path in paths if is_row_file(DirEntry(path, False)))
    if not matches:
        raise UserError(f"{pattern}: no {', '.join(SUFFIXES)} file matches")
    return matches


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
