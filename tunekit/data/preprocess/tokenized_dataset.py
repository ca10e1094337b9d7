"""Tokenized documents in flat arrays, in memory or memory-mapped: 5 bytes per token and 40 bytes per document."""

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tunekit.data.column_usage import ColumnReport, merge_reports, read_reports
from tunekit.data.document import NO_VALUES, UNEQUAL_WEIGHTS, DocFlags, Document
from tunekit.data.readers.row_reader import BadRow
from tunekit.errors import UserError

COLUMNS = {
    "tokens": np.dtype(np.int32),  # (tokens,)
    "loss_mask": np.dtype(np.bool_),
    "lengths": np.dtype(np.int32),  # (documents,)
    "full_lengths": np.dtype(np.int32),
    "doc_flags": np.dtype(np.int32),
    "file_ids": np.dtype(np.int32),  # index of the file name in `FlatDocuments.file_names`
    "row_numbers": np.dtype(np.int64),  # appended to the file name; 0: none
    "num_values": np.dtype(np.int32),
    "values": np.dtype(np.float32),  # (values,)
}
TOKEN_COLUMNS = ("tokens", "loss_mask")
BOUNDS = "bounds"  # (documents + 1,) int64
METADATA_FILE = "about.json"  # written last: a directory without it is incomplete
BAD_ROWS = "bad_rows.jsonl"
TRAILING_NUMBER = re.compile(r"(.*?)([1-9]\d{0,17})?", re.DOTALL)  # file.jsonl:17, owner/name train row 17


class FlatDocuments(NamedTuple):
    """Concatenated documents: the `COLUMNS` by name, and the file names that `file_ids` refers to."""

    columns: dict[str, np.ndarray]
    file_names: list[str]

    def row_location(self, index: int) -> str:
        """File and row of a document."""
        number = int(self.columns["row_numbers"][index])
        return self.file_names[self.columns["file_ids"][index]] + (str(number) if number else "")

    def without_tokens(self) -> "FlatDocuments":
        """Only the columns that `row_location` needs."""
        return FlatDocuments({name: self.columns[name] for name in ("file_ids", "row_numbers")}, self.file_names)


@dataclass(frozen=True)
class PreprocessSummary:
    """Number of rows of a dataset, and of those that did not become one document."""

    rows: int = 0
    filtered: int = 0  # removed by a transform
    skipped: int = 0  # without target tokens or invalid; listed in `bad_rows`
    dropped: int = 0  # too long
    split: int = 0  # into several documents
    row_format: str = ""  # description of the format
    bad_rows: Path | None = field(default=None, compare=False)  # JSON Lines file with where and reason
    columns: tuple[ColumnReport, ...] = field(default=(), compare=False)  # that are not used as their names suggest

    def format(self, skipped: str) -> str:
        """Counts as text. `skipped` is the word for bad rows."""
        labels = {"filtered": "removed by a transform", "skipped": skipped, "dropped": "dropped as too long"}
        labels |= {"split": "split into several"}
        counts = [f"{count:,} {label}" for name, label in labels.items() if (count := getattr(self, name))]
        return ", ".join([f"{self.rows:,} row{'' if self.rows == 1 else 's'}", *counts])

    def __add__(self, other: "PreprocessSummary") -> "PreprocessSummary":
        """Summary of these rows and more rows of the same format."""
        return replace(
            self,
            rows=self.rows + other.rows,
            filtered=self.filtered + other.filtered,
            skipped=self.skipped + other.skipped,
            dropped=self.dropped + other.dropped,
            split=self.split + other.split,
            columns=merge_reports(self.columns, other.columns),
        )


class TokenizedChunk(NamedTuple):
    """Documents of a chunk of rows. `position` is the start of the chunk, `summary` counts all its rows."""

    position: Any
    summary: PreprocessSummary
    bad_rows: list[BadRow]
    flat: FlatDocuments


class TokenizedDataset:
    """All documents of a dataset, concatenated in flat arrays.

    `lengths` (documents,) are their tokens, `bounds` (documents + 1,) their starts and ends, `full_lengths` their
    tokens before truncation. `num_truncated` counts truncated documents, `num_target_tokens` target tokens, which the
    first token of a document never is.
    """

    def __init__(
        self,
        flat: FlatDocuments,
        summary: PreprocessSummary = PreprocessSummary(),
        metadata: dict[str, Any] | None = None,
        lock: object = None,
    ) -> None:
        """`metadata` has the values that are computed from the arrays if it is None. Keeps a reference to `lock`."""
        columns = flat.columns
        self.tokens, self.loss_mask, self.lengths = columns["tokens"], columns["loss_mask"], columns["lengths"]
        self.full_lengths, self.doc_flags = columns["full_lengths"], columns["doc_flags"]
        self.file_names, self.flat, self.values = flat.file_names, flat, columns["values"]
        # End of the values of each document.
        self.value_ends = np.cumsum(columns["num_values"], dtype=np.int64) if len(self.values) else None
        self.bounds = columns[BOUNDS] if BOUNDS in columns else np.append(0, np.cumsum(self.lengths, dtype=np.int64))
        counts = count_targets(columns) if metadata is None else metadata
        self.num_truncated, self.num_target_tokens = counts["truncated"], counts["targets"]
        self.stored_fingerprint: str | None = None if metadata is None else metadata["digest"]
        self.summary, self.lock = summary, lock

    @staticmethod
    def from_documents(documents: Sequence[Document], row_locations: Sequence[str] | None = None) -> "TokenizedDataset":
        """Dataset in memory."""
        locations = [""] * len(documents) if row_locations is None else row_locations
        return TokenizedDataset(flatten_documents(documents, locations))

    @staticmethod
    def open(directory: Path, lock: object = None) -> "TokenizedDataset":
        """Memory-map the files of a `TokenizedDatasetWriter`."""
        metadata = json.loads((directory / METADATA_FILE).read_text("utf-8"))
        dtypes = {**COLUMNS, BOUNDS: np.dtype(np.int64)}
        columns = {name: map_file(directory / name, dtype) for name, dtype in dtypes.items()}
        bad_rows = directory / BAD_ROWS
        prepared = metadata["prepared"] | {"columns": read_reports(metadata["prepared"]["columns"])}
        summary = PreprocessSummary(**prepared, bad_rows=bad_rows if bad_rows.is_file() else None)
        return TokenizedDataset(FlatDocuments(columns, metadata["names"]), summary, metadata, lock)

    @property
    def fingerprint(self) -> str:
        """Hash of the tokens, loss masks, and labels of all documents."""
        if self.stored_fingerprint is not None:
            return self.stored_fingerprint
        builder = FingerprintBuilder()
        builder.add(self.flat.columns)
        return builder.hex

    def row_location(self, index: int) -> str:
        """File and row of a document."""
        return self.flat.row_location(index)

    def require_equal_weights(self) -> None:
        """Raise UserError with the row of the first document whose target tokens have weights."""
        weighted = (self.doc_flags & DocFlags.WEIGHTED) != 0
        if weighted.any():
            raise UserError(f"{self.row_location(int(weighted.argmax()))}: {UNEQUAL_WEIGHTS}")

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Document:
        if not 0 <= index < len(self):
            raise IndexError(index)
        span = slice(self.bounds[index], self.bounds[index + 1])
        flags = DocFlags(int(self.doc_flags[index]))
        document = Document(self.tokens[span], self.loss_mask[span], int(self.full_lengths[index]), flags)
        if self.value_ends is None:
            return document
        end, count = int(self.value_ends[index]), int(self.flat.columns["num_values"][index])
        return document._replace(values=self.values[end - count : end])

    def __iter__(self) -> Iterator[Document]:
        return map(self.__getitem__, range(len(self)))


class ConcatDataset:
    """Documents of several datasets as one sequence."""

    def __init__(self, datasets: Sequence[TokenizedDataset]) -> None:
        self.datasets = datasets
        self.starts = np.cumsum([0, *(len(dataset) for dataset in datasets)]).tolist()
        self.lengths = np.concatenate([dataset.lengths for dataset in datasets])

    @property
    def fingerprint(self) -> str:
        """Hash of the documents."""
        return hashlib.sha256("".join(dataset.fingerprint for dataset in self.datasets).encode()).hexdigest()

    def locate(self, index: int) -> tuple[TokenizedDataset, int]:
        """Dataset of a document, and the index of the document in it."""
        dataset = bisect_right(self.starts, index) - 1
        if not 0 <= dataset < len(self.datasets):
            raise IndexError(index)
        return self.datasets[dataset], index - self.starts[dataset]

    def row_location(self, index: int) -> str:
        """File and row of a document."""
        dataset, i = self.locate(index)
        return dataset.row_location(i)

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, index: int) -> Document:
        dataset, i = self.locate(index)
        return dataset[i]

    def __iter__(self) -> Iterator[Document]:
        for dataset in self.datasets:
            yield from dataset


def map_file(path: Path, dtype: np.dtype) -> np.ndarray:
    """Memory-map a file as an array. An empty file, which cannot be mapped, is an empty array."""
    return np.asarray(np.memmap(path, dtype, "r")) if path.stat().st_size else np.empty(0, dtype)


def is_complete(directory: Path) -> bool:
    """Whether a directory has all files of a `TokenizedDatasetWriter` of this version."""
    try:
        metadata = json.loads((directory / METADATA_FILE).read_text("utf-8"))
        if metadata.get("columns") != list(COLUMNS):
            return False
        counts = dict.fromkeys(COLUMNS, metadata["documents"]) | dict.fromkeys(TOKEN_COLUMNS, metadata["tokens"])
        counts["values"] = metadata["values"]
        sizes = {name: count * COLUMNS[name].itemsize for name, count in counts.items()}
        sizes[BOUNDS] = 8 * (metadata["documents"] + 1)
        return all((directory / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):  # a file is missing, also if another process removes the directory meanwhile
        return False


class FingerprintBuilder:
    """Hash of columns that are added in chunks. Labels and flags only count if there are any."""

    def __init__(self) -> None:
        self.column_hashes = {name: hashlib.sha256() for name in ("tokens", "loss_mask", "lengths")}
        self.label_hash, self.has_labels = hashlib.sha256(), False

    def add(self, columns: dict[str, np.ndarray]) -> None:
        """Add the columns of a chunk."""
        for name, column_hash in self.column_hashes.items():
            column_hash.update(np.ascontiguousarray(columns[name], COLUMNS[name]).data)
        preferences = columns["doc_flags"] & int(DocFlags.DESIRABLE | DocFlags.UNDESIRABLE)
        for labels in (preferences, columns["num_values"], columns["values"]):
            self.label_hash.update(np.ascontiguousarray(labels).data)
            self.has_labels |= bool(labels.any())

    @property
    def hex(self) -> str:
        """Hexadecimal digits of the hash."""
        hashes = [*self.column_hashes.values(), *([self.label_hash] if self.has_labels else [])]
        return hashlib.sha256("".join(column_hash.hexdigest() for column_hash in hashes).encode()).hexdigest()


def flatten_documents(documents: Sequence[Document], row_locations: Sequence[str]) -> FlatDocuments:
    """Concatenate documents and the locations of their rows."""
    file_ids: dict[str, int] = {}
    locations = [split_location(location) for location in row_locations]
    values = {
        "tokens": np.concatenate([np.empty(0, np.int32), *(document.tokens for document in documents)]),
        "loss_mask": np.concatenate([np.empty(0, np.bool_), *(document.loss_mask for document in documents)]),
        "lengths": [len(document.tokens) for document in documents],
        "full_lengths": [document.full_length for document in documents],
        "doc_flags": [int(document.doc_flags) for document in documents],
        "file_ids": [file_ids.setdefault(name, len(file_ids)) for name, _ in locations],
        "row_numbers": [number for _, number in locations],
        "num_values": [len(document.values) for document in documents],
        "values": np.concatenate([NO_VALUES, *(document.values for document in documents)]),
    }
    return FlatDocuments({name: np.asarray(values[name], dtype) for name, dtype in COLUMNS.items()}, list(file_ids))


def split_location(location: str) -> tuple[str, int]:
    """Split a row location into the text before the number at its end, and the number; 0 if there is none."""
    match = TRAILING_NUMBER.fullmatch(location)
    assert match is not None
    return match[1], int(match[2] or 0)


def count_targets(columns: dict[str, np.ndarray]) -> dict[str, int]:
    """Number of truncated documents and of target tokens."""
    lengths, loss_mask = columns["lengths"], columns["loss_mask"]
    starts = (np.cumsum(lengths, dtype=np.int64) - lengths)[lengths > 0]
    num_targets = np.count_nonzero(loss_mask) - np.count_nonzero(loss_mask[starts])
    return {"truncated": int((lengths < columns["full_lengths"]).sum()), "targets": int(num_targets)}


class TokenizedDatasetWriter:
    """Writes documents into the files of a directory, chunk by chunk, for `TokenizedDataset.open`."""

    def __init__(self, directory: Path, row_format: str = "") -> None:
        self.directory, self.file_ids, self.fingerprint = directory, {}, FingerprintBuilder()
        self.files = {name: (directory / name).open("wb") for name in (*COLUMNS, BOUNDS)}
        self.files[BOUNDS].write(np.zeros(1, np.int64).data)
        self.counts = {"documents": 0, "tokens": 0, "values": 0, "targets": 0, "truncated": 0}
        self.summary = PreprocessSummary(row_format=row_format)

    def __enter__(self) -> "TokenizedDatasetWriter":
        return self

    def __exit__(self, *error: object) -> None:
        for file in self.files.values():
            file.raw.close()  # drops the buffer, which `finish` flushes: after a failed write it must not be written

    def add(self, chunk: TokenizedChunk) -> None:
        """Append the documents of a chunk, and its bad rows to their list."""
        columns = dict(chunk.flat.columns)
        file_ids = [self.file_ids.setdefault(name, len(self.file_ids)) for name in chunk.flat.file_names]
        columns["file_ids"] = np.array(file_ids, np.int32)[columns["file_ids"]]
        columns[BOUNDS] = np.cumsum(columns["lengths"], dtype=np.int64) + self.counts["tokens"]
        for name, file in self.files.items():
            file.write(columns[name].data)
        sizes = {"documents": "lengths", "tokens": "tokens", "values": "values"}
        added = {name: len(columns[column]) for name, column in sizes.items()} | count_targets(columns)
        self.counts = {name: value + added[name] for name, value in self.counts.items()}
        self.fingerprint.add(columns)
        self.summary += chunk.summary
        if chunk.bad_rows:
            with (self.directory / BAD_ROWS).open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(bad_row._asdict(), ensure_ascii=True) + "\n" for bad_row in chunk.bad_rows)

    def finish(self, **metadata: Any) -> None:
        """Flush all files and write the metadata file. `metadata` adds keys for `tune cache`."""
        for file in self.files.values():
            file.flush()
        summary = {name: value for name, value in asdict(self.summary).items() if name != "bad_rows"}
        content = {**metadata, **self.counts, "digest": self.fingerprint.hex, "prepared": summary}
        content |= {"names": list(self.file_ids), "columns": list(COLUMNS)}
        (self.directory / METADATA_FILE).write_text(json.dumps(content), "utf-8")
