"""Which files of a folder hold a split. Folders are listed by a function: on this machine, or behind a URL."""

import re
from collections.abc import Callable, Iterable
from pathlib import PurePosixPath
from typing import NamedTuple

from tunekit.errors import UserError

TEXT, COLUMNS = (".json", ".jsonl", ".csv"), (".parquet", ".arrow")
PACKED = (".gz", ".zst")  # of text; columns are packed within
KINDS = (*TEXT, *COLUMNS)
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval", "heldout")
# What `datasets` puts beside the rows that it saves, and what it keeps of later work on them.
BESIDE = re.compile(r"\..*|dataset_dict\.json|dataset_infos?\.json|state\.json|cache-.*\.arrow")


class DirEntry(NamedTuple):
    """What a folder holds: a file or another folder, by its whole path."""

    path: str
    is_folder: bool

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    @property
    def split(self) -> str:
        """What split it may be of: `test.jsonl`, `test-00000-of-00002.parquet` and a folder `test` are of `test`."""
        return self.name if self.is_folder else re.split(r"[-_.]", self.name)[0]


def file_format(name: str) -> str:
    """How the file is read, by the end of its name; empty, if it is not. Of `rows.jsonl.gz`, what is packed in it."""
    path = PurePosixPath(name)
    if path.suffix in PACKED:
        path = path.with_suffix("")
        return path.suffix if path.suffix in TEXT else ""
    return path.suffix if path.suffix in KINDS else ""


def holds_rows(entry: DirEntry) -> bool:
    return not entry.is_folder and file_format(entry.name) != "" and BESIDE.fullmatch(entry.name) is None


def files_in_dir(folder: str, split: str, listed: Callable[[str], Iterable[DirEntry]]) -> list[str]:
    """Files of a folder that are called like the split, or lie in one that is; all, if none is called like one.

    A folder without files of rows may have one for each split, as `datasets` saves them, or have them below `data`.
    """
    entries = sorted(listed(folder))
    files = [entry for entry in entries if holds_rows(entry)]
    folders = [entry for entry in entries if entry.is_folder and not entry.name.startswith(".")]
    among = files or [entry for entry in folders if entry.split in (*SPLITS, split)]
    if not among:
        deeper = [entry.path for entry in folders if entry.name == "data"]
        if deeper:
            return files_in_dir(deeper[0], split, listed)
        raise UserError(f"{folder}: the folder holds no {', '.join(KINDS)} file{advice(folders)}")
    known = sorted({entry.split for entry in among} & {*SPLITS, split})
    found = [entry for entry in among if entry.split == split] if known else among
    if not found or (not known and split != "train"):
        raise UserError(f"{folder}: no split {split!r}; it has {', '.join(known) or 'train'}")
    return [path for entry in found for path in (below(entry, listed) if entry.is_folder else [entry.path])]


def below(folder: DirEntry, listed: Callable[[str], Iterable[DirEntry]]) -> list[str]:
    """All files of rows in the folder of a split."""
    found = [entry.path for entry in sorted(listed(folder.path)) if holds_rows(entry)]
    if not found:
        raise UserError(f"{folder.path}: the folder holds no {', '.join(KINDS)} file")
    return found


def advice(folders: list[DirEntry]) -> str:
    """The folders below, one of which may be meant."""
    if not folders:
        return ""
    names = [entry.name for entry in folders]
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"; name one of the folders in it: {', '.join(names[:5])}{more}"


def is_glob(source: str) -> bool:
    """Whether a source is a pattern. What stands behind a ? in a web address is a question to the server."""
    return not source.startswith(("http://", "https://")) and any(mark in source for mark in "*?[")


def files_matching(pattern: str, paths: Iterable[str]) -> list[str]:
    """Files of rows among those that a pattern matches."""
    found = sorted(path for path in paths if holds_rows(DirEntry(path, False)))
    if not found:
        raise UserError(f"{pattern}: matches no {', '.join(KINDS)} file")
    return found


def check_row_file(path: str) -> None:
    """UserError for a file that rows are not read from."""
    if not file_format(path):
        name = PurePosixPath(path)
        raise UserError(f"{path}: rows are read from {', '.join(KINDS)} files, not from {name.suffix or 'this'}")


def check_train_split(source: str, split: str) -> None:
    """UserError for a split of what has none: a file, or files that a pattern names."""
    if split != "train":
        raise UserError(
            f"{source}: a file has only the split 'train', not {split!r}; slice it (train[90%:]) or name another"
        )
