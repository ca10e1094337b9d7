"""Where rows come from: a file, a folder of files, a bundled data set or a name on the Hub; and which part of them."""

import importlib
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tunekit import assets
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
from tunekit.data.readers.filesystem import CompressedFile, DataFile, LocalFile, open_gzip, read_error
from tunekit.data.readers.json_reader import JsonFile
from tunekit.data.readers.row_reader import FileShard, RowReader
from tunekit.errors import UserError

READERS = {".json": JsonFile, ".jsonl": partial(JsonFile, lines=True), ".csv": CsvFile}
SLOW = {
    ".parquet": ("tunekit.data.readers.parquet_reader", "ParquetFile"),
    ".arrow": ("tunekit.data.readers.arrow_reader", "ArrowFile"),
    ".zst": ("tunekit.data.readers.arrow_reader", "unzstd"),
    "hub": ("tunekit.data.readers.hf_datasets", "hub_set"),
    "hub stream": ("tunekit.data.readers.hf_datasets", "hub_files"),
    "remote": ("tunekit.data.readers.remote_files", "files"),
}
# A data set of the Hub: owner/name, with a configuration and a revision if wanted: owner/name:config@revision
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:[\w.-]+)?(@[\w./-]+)?")
SPLIT = re.compile(r"([\w.-]+)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?")


class SplitSlice(NamedTuple):
    """A split's name and the part of it that is taken; a bound is a row number or, with `%`, a share of the rows."""

    name: str
    low: str | None
    high: str | None

    def bounds(self, count: int) -> tuple[int, int]:
        """First row and the one after the last, of `count` rows."""
        low = 0 if self.low is None else row_number(self.low, count)
        return low, count if self.high is None else max(low, row_number(self.high, count))

    def fixed(self, limit: int | None) -> tuple[int, int | None] | None:
        """The bounds, where they do not depend on how many rows there are (None: the last); else None."""
        if any(bound is not None and (bound[0] == "-" or bound[-1] == "%") for bound in (self.low, self.high)):
            return None
        low = int(self.low or 0)
        ends = ([] if self.high is None else [int(self.high)]) + ([] if limit is None else [low + limit])
        return low, max(low, min(ends)) if ends else None


def row_number(bound: str, count: int) -> int:
    number = round(count * int(bound[:-1]) / 100) if bound.endswith("%") else int(bound)
    return min(max(number + count if bound.startswith("-") else number, 0), count)


def parse_split(text: str) -> SplitSlice:
    """`train`, `train[:90%]`, `train[100:]`, `train[-10%:]`; ValueError if it is none of these."""
    match = SPLIT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no split; write train, train[:90%] or train[100:200]")
    for bound in match.groups()[1:]:
        if bound is not None and bound.endswith("%") and abs(int(bound[:-1])) > 100:
            raise ValueError(f"{text!r} takes more than 100%")
    return SplitSlice(*match.groups())


def open_dataset(source: str, split: str, limit: int | None = None, stream: bool = False) -> RowReader:
    """The rows of `split` (see `parse_split`), at most `limit` of them. A stream is not counted before it is read."""
    cut = parse_split(split)
    fixed = cut.fixed(limit)
    if stream and fixed is None:
        raise UserError(
            f"{source}: {split} wants to know how many rows there are; of a stream, take train[1000:] or [:1000]"
        )
    parts = parts_of(source, cut.name, stream)
    if stream and fixed is not None:
        return RowReader(parts, *fixed)
    counts = counted(parts, None if fixed is None else fixed[1])
    low, high = cut.bounds(sum(counts))
    high = high if limit is None else min(high, low + limit)
    if low == high:
        count, empty = sum(counted(parts, None)), "the file is" if len(parts) == 1 else f"its {len(parts)} files are"
        raise UserError(f"{source}: {split} holds no row" + (f" (of {count})" if count else f": {empty} empty"))
    return RowReader(parts, low, high, counts)


def parts_of(source: str, split: str, stream: bool) -> tuple[FileShard, ...]:
    """What a split is made of, unread."""
    files = find_data_files(source, split)
    if files is None and not stream:
        return (slow("hub")(source, split),)
    if files is None or is_url(source):
        return tuple(map(read, slow("remote" if is_url(source) else "hub stream")(source, split)))
    return tuple(read(LocalFile(path)) for path in files)


def counted(parts: tuple[FileShard, ...], most: int | None) -> tuple[int, ...]:
    """Rows of each part; no more than `most` of all are counted."""
    counts: list[int] = []
    for part in parts:
        left = None if most is None else most - sum(counts)
        if left == 0:
            break
        counts.append(part.count(left))
    return tuple(counts)


def find_data_files(source: str, split: str) -> list[Path] | None:
    """Files of this machine that hold the split, none of them read; None if `source` is a Hub name.

    There are none where a URL is the source: what it names is found when it is opened.
    """
    if is_url(source):
        return []
    folder = assets.dataset_dir(source)
    path = Path(source.removeprefix("file://")).expanduser() if folder is None else folder
    try:
        if path.is_dir():
            return [Path(file) for file in files_in_dir(str(path), split, listed)]
        if path.is_file():
            check_row_file(str(path))
            check_train_split(str(path), split)
            return [path]
    except OSError as error:
        raise read_error(str(path), error) from None
    if is_glob(source):
        check_train_split(source, split)
        return [Path(file) for file in files_matching(source, map(str, matching(path)))]
    if file_format(source) or HUB_NAME.fullmatch(source) is None:
        raise UserError(f"{source}: no such file or folder")
    return None


def matching(pattern: Path) -> Iterator[Path]:
    """What a pattern matches, which may begin at the root."""
    return Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor)))


def is_url(source: str) -> bool:
    """Whether a source lies on another machine."""
    return "://" in source and not source.startswith("file://")


def listed(folder: str) -> list[DirEntry]:
    return [DirEntry(str(path), path.is_dir()) for path in Path(folder).iterdir()]


def read(file: DataFile) -> FileShard:
    """The rows of a file, by how its name ends."""
    end, within = Path(file.name).suffix, file_format(file.name)
    if end != within:
        file = CompressedFile(file, open_gzip if end == ".gz" else slow(end))
    return (READERS[within] if within in READERS else slow(within))(file)


def slow(name: str):
    """What stands in a module whose library takes a second to import: loaded when such a source is opened."""
    module, found = SLOW[name]
    return vars(importlib.import_module(module))[found]
