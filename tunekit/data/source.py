"""Where rows come from: a file, a folder of files, a bundled data set or a name on the Hub; and which part of them."""

import importlib
import re
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tunekit import bundled
from tunekit.data.csvfile import Csv
from tunekit.data.jsonfile import Json
from tunekit.data.storage import Local, Packed, Stored, gunzip
from tunekit.data.table import Part, Table
from tunekit.errors import UserError

READERS = {".json": Json, ".jsonl": partial(Json, lines=True), ".csv": Csv}
SLOW = {
    ".parquet": ("tunekit.data.parquet", "Parquet"),
    ".arrow": ("tunekit.data.arrow", "Arrow"),
    ".zst": ("tunekit.data.arrow", "unzstd"),
    "hub": ("tunekit.data.hub", "hub_set"),
}
UNPACK = (".gz", ".zst")  # of text; the others pack themselves
KINDS = (*READERS, ".parquet", ".arrow")
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval", "heldout")
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")
SPLIT = re.compile(r"([\w.-]+)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?")


class Split(NamedTuple):
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


def parse_split(text: str) -> Split:
    """`train`, `train[:90%]`, `train[100:]`, `train[-10%:]`; ValueError if it is none of these."""
    match = SPLIT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no split; write train, train[:90%] or train[100:200]")
    for bound in match.groups()[1:]:
        if bound is not None and bound.endswith("%") and abs(int(bound[:-1])) > 100:
            raise ValueError(f"{text!r} takes more than 100%")
    return Split(*match.groups())


def open_source(source: str, split: str, limit: int | None = None, stream: bool = False) -> Table:
    """The rows of `split` (see `parse_split`), at most `limit` of them. A stream is not counted before it is read."""
    cut = parse_split(split)
    files = find(source, cut.name)
    parts = (slow("hub")(source, cut.name),) if files is None else tuple(read(Local(path)) for path in files)
    fixed = cut.fixed(limit)
    if stream:
        if fixed is None:
            raise UserError(f"{source}: {split} wants the number of rows, which of a stream nobody knows; use numbers")
        return Table(parts, *fixed)
    counts = counted(parts, None if fixed is None else fixed[1])
    low, high = cut.bounds(sum(counts))
    high = high if limit is None else min(high, low + limit)
    if low == high:
        raise UserError(f"{source}: {split} holds no row (of {sum(counted(parts, None))})")
    return Table(parts, low, high, counts)


def counted(parts: tuple[Part, ...], most: int | None) -> tuple[int, ...]:
    """Rows of each part; no more than `most` of all are counted."""
    counts: list[int] = []
    for part in parts:
        left = None if most is None else most - sum(counts)
        if left == 0:
            break
        counts.append(part.count(left))
    return tuple(counts)


def find(source: str, split: str) -> list[Path] | None:
    """Files that hold the split of a local or bundled source, without reading them; None if `source` is a Hub name."""
    folder = bundled.data(source)
    path = Path(source).expanduser() if folder is None else folder
    if path.is_dir():
        return find_in_folder(path, split)
    if path.is_file():
        return find_file(path, split)
    if path.suffix in KINDS or HUB_NAME.fullmatch(source) is None:
        raise UserError(f"{source}: no such file or folder")
    return None


def find_file(path: Path, split: str) -> list[Path]:
    if path.suffix not in KINDS:
        raise UserError(f"{path}: rows are read from {', '.join(KINDS)} files, not from {path.suffix or 'this'}")
    if split != "train":
        raise UserError(
            f"{path}: a file has only the split 'train', not {split!r}; slice it (train[90%:]) or name another"
        )
    return [path]


def find_in_folder(folder: Path, split: str) -> list[Path]:
    """Files called like the split (`test.jsonl`, `test-00000-of-00002.parquet`); all, if none is called like one."""
    files = sorted(path for path in folder.iterdir() if path.suffix in KINDS and not path.name.startswith("."))
    if not files:
        raise UserError(f"{folder}: the folder holds no {', '.join(KINDS)} file")
    names = {path: re.split(r"[-_.]", path.name)[0] for path in files}
    known = sorted({name for name in names.values() if name in (*SPLITS, split)})
    found = [path for path in files if names[path] == split] if known else files
    if not found or (not known and split != "train"):
        raise UserError(f"{folder}: no split {split!r}; it has {', '.join(known) or 'train'}")
    return found


def read(file: Stored) -> Part:
    """The rows of a file, by how its name ends."""
    path = Path(file.name)
    if path.suffix in UNPACK:
        file, path = Packed(file, gunzip if path.suffix == ".gz" else slow(path.suffix)), path.with_suffix("")
    return (READERS[path.suffix] if path.suffix in READERS else slow(path.suffix))(file)


def slow(kind: str):
    """A reader whose library takes a second to import: its module is loaded when such a source is opened."""
    module, name = SLOW[kind]
    return vars(importlib.import_module(module))[name]
