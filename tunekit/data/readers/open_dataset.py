"""Open datasets: a file, a directory, a glob pattern, a URL, a bundled dataset, or a Hub name; and slice splits."""

import importlib
import os
import re
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tunekit import assets
from tunekit.config.secrets import hide_secrets
from tunekit.data.readers.csv_reader import CsvFile
from tunekit.data.readers.data_files import (
    DirEntry,
    check_row_file,
    check_train_split,
    file_format,
    files_in_dir,
    files_matching,
    is_glob,
)
from tunekit.data.readers.filesystem import CompressedFile, DataFile, LocalFile, open_gzip, wrap_read_errors
from tunekit.data.readers.json_reader import JsonFile
from tunekit.data.readers.library_errors import LibraryErrors
from tunekit.data.readers.row_reader import FileShard, RowReader
from tunekit.errors import UserError

READERS = {".json": JsonFile, ".jsonl": partial(JsonFile, lines=True), ".csv": CsvFile}
LAZY_IMPORTS = {
    ".parquet": ("tunekit.data.readers.arrow_reader", "ParquetFile"),
    ".arrow": ("tunekit.data.readers.arrow_reader", "ArrowFile"),
    ".zst": ("tunekit.data.readers.arrow_reader", "open_zstd"),
    "hub": ("tunekit.data.readers.hf_datasets", "open_hub_dataset"),
    "hub stream": ("tunekit.data.readers.hf_datasets", "list_hub_files"),
    "remote": ("tunekit.data.readers.remote_files", "open_remote_files"),
    "filesystem": ("tunekit.data.readers.remote_files", "open_filesystem"),
}
# owner/name, with an optional configuration and revision: owner/name:config@revision
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:[\w.-]+)?(@[\w./-]+)?")
SPLIT = re.compile(r"([\w.-]+)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?")


class SplitSlice(NamedTuple):
    """A split and the bounds of a slice of it. A bound is a row number, or a percentage with `%`."""

    name: str
    low: str | None
    high: str | None

    def bounds(self, count: int) -> tuple[int, int]:
        """Return the first row and the row after the last one, of `count` rows."""
        low = 0 if self.low is None else row_number(self.low, count)
        return low, count if self.high is None else max(low, row_number(self.high, count))

    def absolute_bounds(self, limit: int | None) -> tuple[int, int | None] | None:
        """Return the bounds if they do not depend on the number of rows, else None. An end of None is the last row."""
        if any(bound is not None and (bound[0] == "-" or bound[-1] == "%") for bound in (self.low, self.high)):
            return None
        low = int(self.low or 0)
        ends = ([] if self.high is None else [int(self.high)]) + ([] if limit is None else [low + limit])
        return low, max(low, min(ends)) if ends else None


def row_number(bound: str, count: int) -> int:
    number = round(count * int(bound[:-1]) / 100) if bound.endswith("%") else int(bound)
    return min(max(number + count if bound.startswith("-") else number, 0), count)


def parse_split(text: str) -> SplitSlice:
    """Parse `train`, `train[:90%]`, `train[100:]`, or `train[-10%:]`. Raise ValueError for anything else."""
    match = SPLIT.fullmatch(text)
    if match is None:
        raise ValueError(f"must be a split such as train, train[:90%] or train[100:200], got {text!r}")
    for bound in match.groups()[1:]:
        if bound is not None and bound.endswith("%") and abs(int(bound[:-1])) > 100:
            raise ValueError(f"bounds must be at most 100%, got {text!r}")
    return SplitSlice(*match.groups())


def open_dataset(source: str, split: str, limit: int | None = None, streaming: bool = False) -> RowReader:
    """Open the rows of `split` (see `parse_split`), at most `limit` rows. Rows are not counted if `streaming`."""
    split_slice = parse_split(split)
    bounds = split_slice.absolute_bounds(limit)
    if streaming and bounds is None:
        hint = "Use row numbers, as in train[1000:] or train[:1000]."
        raise UserError(f"{source}: {split} needs the number of rows, which is unknown with streaming. {hint}")
    shards = open_shards(source, split_slice.name, streaming)
    if streaming and bounds is not None:
        return RowReader(shards, *bounds)
    counts = count_rows(shards, None if bounds is None else bounds[1])
    low, high = split_slice.bounds(sum(counts))
    high = high if limit is None else min(high, low + limit)
    if low == high:
        count = sum(count_rows(shards, None))
        files_are = "the file is" if len(shards) == 1 else f"its {len(shards)} files are"
        raise UserError(f"{source}: {split} has no rows" + (f" (of {count})" if count else f": {files_are} empty"))
    return RowReader(shards, low, high, counts)


def open_shards(source: str, split: str, streaming: bool) -> tuple[FileShard, ...]:
    """Return the files of a split, without reading rows."""
    files = find_data_files(source, split)
    with source_errors(source):
        if files is None and not streaming:
            return (lazy_import("hub")(source, split),)
        if files is None or is_url(source):
            return tuple(map(open_shard, lazy_import("remote" if is_url(source) else "hub stream")(source, split)))
        return tuple(open_shard(LocalFile(path)) for path in files)


def source_errors(source: str) -> LibraryErrors:
    """Context manager that turns any error of a library into a UserError that names the source."""

    def describe(error: Exception) -> str:
        reason = hide_secrets(" ".join(str(error).split()) or type(error).__name__)
        return f"{hide_secrets(source)}: cannot open this `source`: {reason}"

    return LibraryErrors(describe)


def count_rows(shards: tuple[FileShard, ...], limit: int | None) -> tuple[int, ...]:
    """Count the rows of each file, at most `limit` rows in total."""
    counts: list[int] = []
    for shard in shards:
        remaining = None if limit is None else limit - sum(counts)
        if remaining == 0:
            break
        counts.append(shard.count(remaining))
    return tuple(counts)


def find_data_files(source: str, split: str) -> list[Path] | None:
    """Return the local files of a split, or of a slice of it, without reading them; None if `source` is a Hub name.

    The list is empty if `source` is a URL: its files are found when it is opened.
    """
    split = parse_split(split).name
    if not {"\0", "\n", "\r"}.isdisjoint(source):
        raise UserError(f"{source!r}: `source` must be a single line without null characters")
    with source_errors(source):
        if is_url(source):
            lazy_import("filesystem")(source)
            return []
        bundled = assets.DATA.get(source)
        path = Path(source.removeprefix("file://")).expanduser() if bundled is None else bundled
        files = find_local_files(path, source, split)
        if files is None and HUB_NAME.fullmatch(source) is None:
            raise UserError(f"{source}: no such file or directory")
        if irregular := next((file for file in files or () if not Path(file).is_file()), None):
            raise UserError(f"{irregular}: not a regular file, which can be read repeatedly. Copy it to a file.")
        return None if files is None else [Path(file) for file in files]


def find_local_files(path: Path, source: str, split: str) -> list[str] | None:
    """Return the files of a split at a path; None if there is nothing."""
    with wrap_read_errors(str(path)):
        if path.is_dir():
            return files_in_dir(str(path), split, list_dir)
        if path.exists():
            check_row_file(str(path))
            check_train_split(str(path), split)
            return [str(path)]
        if is_glob(source):
            check_train_split(source, split)
            return files_matching(source, str(path), list_dir)
    name = source.partition(":")[0]
    if source != name and Path(name).expanduser().is_file():
        raise UserError(f"{source}: no such file or directory. For the file {name}, set `source: {name}`")
    if file_format(source):
        raise UserError(f"{source}: no such file or directory")
    return None


def is_url(source: str) -> bool:
    """Whether a source is a URL other than `file://`."""
    return "://" in source and not source.startswith("file://")


def list_dir(directory: str) -> list[DirEntry]:
    prefix = f"{directory.rstrip('/')}/" if directory else ""
    with os.scandir(directory or ".") as entries:
        return [DirEntry(prefix + entry.name, is_dir(entry), entry.is_symlink()) for entry in entries]


def is_dir(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a directory, or a link to one. Links that cannot be followed are not."""
    return Path(entry.path).is_dir() if entry.is_symlink() else entry.is_dir()


def open_shard(file: DataFile) -> FileShard:
    """Open a file of rows. The suffix of its name determines the format and the compression."""
    suffix, row_format = Path(file.name).suffix, file_format(file.name)
    if suffix != row_format:
        file = CompressedFile(file, open_gzip if suffix == ".gz" else lazy_import(suffix))
    return (READERS[row_format] if row_format in READERS else lazy_import(row_format))(file)


def lazy_import(name: str):
    """Import a reader on first use: its library takes about a second to import."""
    module, attribute = LAZY_IMPORTS[name]
    return getattr(importlib.import_module(module), attribute)
