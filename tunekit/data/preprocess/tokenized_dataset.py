"""Tokenised rows, held flat in memory or in mapped files: 5 bytes a token and 40 a document, however many there are."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tunekit.data.doc_flags import DocFlags
from tunekit.data.readers.row_reader import BadRow

COLUMNS = {
    "tokens": np.dtype(np.int32),  # (tokens,)
    "learnt": np.dtype(np.bool_),
    "lengths": np.dtype(np.int32),  # (documents,)
    "whole": np.dtype(np.int32),
    "signs": np.dtype(np.int32),
    "names": np.dtype(np.int32),  # which of the names of places, to which the number is put
    "numbers": np.dtype(np.int64),
    "valued": np.dtype(np.int32),  # how many of the values are a document's
    "values": np.dtype(np.float32),  # (values,)
}
TOKEN_COLUMNS = ("tokens", "learnt")
NO_VALUES = np.empty(0, np.float32)
BOUNDS = "bounds"  # (documents + 1,) int64
METADATA_FILE = "about.json"  # written last: a folder without it is not whole
BAD_ROWS = "bad_rows.jsonl"
TRAILING_NUMBER = re.compile(r"(.*?)([1-9]\d{0,17})?", re.DOTALL)  # file.jsonl:17, owner/name train row 17


class Document(NamedTuple):
    """Token ids (length,) int32, which of them are learnt (length,) bool, and how many there were before it was cut.

    `values` (values,) float32: what a row says of it in numbers, its label or its margin, or a label for each step.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    full_length: int
    doc_flags: DocFlags = DocFlags(0)
    values: np.ndarray = NO_VALUES

    @property
    def value(self) -> float:
        """What is said of all of it; NaN: nothing."""
        return float("nan") if not len(self.values) or self.doc_flags & DocFlags.STEPWISE else float(self.values[0])

    def prefix(self, length: int) -> "Document":
        """Its first tokens, and what is said of these."""
        learnt = self.loss_mask[:length]
        values = self.values[: int(learnt.sum())] if self.doc_flags & DocFlags.STEPWISE else self.values
        return self._replace(tokens=self.tokens[:length], learnt=learnt, values=values)


def first_target(document: Document) -> int:
    """Where the answer begins, behind the end if there is none; a first token is never learnt."""
    learnt = document.loss_mask[1:]
    return 1 + (int(learnt.argmax()) if learnt.any() else len(learnt))


class FlatDocuments(NamedTuple):
    """Documents one after the other, `COLUMNS` by name; `names[i]` begins the place of a document whose name is i."""

    columns: dict[str, np.ndarray]
    file_names: list[str]

    def row_location(self, index: int) -> str:
        """File and row that a document is from."""
        number = int(self.columns["numbers"][index])
        return self.file_names[self.columns["names"][index]] + (str(number) if number else "")

    def without_tokens(self) -> "FlatDocuments":
        """What `where` needs, and no tokens."""
        return FlatDocuments({name: self.columns[name] for name in ("names", "numbers")}, self.file_names)


class TokenizedChunk(NamedTuple):
    """What a chunk of rows became. `place`: where the chunk begins; `rows` that it holds, whatever became of them.

    `left_out` rows by a transform, `dropped` as too long, `split` into several documents.
    """

    position: Any
    rows: int
    filtered: int
    dropped: int
    split: int
    bad_rows: list[BadRow]
    flat: FlatDocuments

    @property
    def documents(self) -> "TokenizedDataset":
        return TokenizedDataset.from_flat(self.flat)


@dataclass(frozen=True)
class PreprocessSummary:
    """What became of the rows of a data set: how many there were, and of how many there is no document."""

    rows: int = 0
    filtered: int = 0  # by a transform
    skipped: int = 0  # nothing could be learnt from them; `bad_rows` lists them
    dropped: int = 0  # too long
    split: int = 0  # into several documents
    row_format: str = ""  # what the rows are, in words
    bad_rows: Path | None = field(default=None, compare=False)  # a JSON line each: where, reason

    def __str__(self) -> str:
        return self.format("skipped")

    def format(self, skipped: str) -> str:
        """What became of the rows; `skipped`: what those are called from which nothing could be learnt."""
        words = {"left_out": "left out by a transform", "skipped": skipped, "dropped": "dropped as too long"}
        words |= {"split": "split into several"}
        counts = [f"{vars(self)[name]:,} {word}" for name, word in words.items() if vars(self)[name]]
        return ", ".join([f"{self.rows:,} row{'' if self.rows == 1 else 's'}", *counts])

    def add_chunk(self, part: TokenizedChunk) -> "PreprocessSummary":
        """With the counts of another part."""
        return replace(
            self,
            rows=self.rows + part.rows,
            left_out=self.filtered + part.filtered,
            skipped=self.skipped + len(part.bad_rows),
            dropped=self.dropped + part.dropped,
            split=self.split + part.split,
        )


class TokenizedDataset:
    """All documents of a data set, one after the other in flat arrays.

    `lengths` (documents,) counts their tokens, `bounds` (documents + 1,) says where they begin, `whole` what they had
    before they were cut. `truncated` counts those that were cut, `targets` the tokens to learn: a first one is none.
    """

    def __init__(self, documents: Iterable[Document], wheres: Sequence[str] | None = None) -> None:
        kept = list(documents)
        self.set_columns(flatten_documents(kept, [""] * len(kept) if wheres is None else wheres))

    @staticmethod
    def from_flat(flat: FlatDocuments, prepared: PreprocessSummary | None = None) -> "TokenizedDataset":
        """Documents that are flat already."""
        found = TokenizedDataset.__new__(TokenizedDataset)
        found.set_columns(flat, prepared or PreprocessSummary())
        return found

    @staticmethod
    def open(folder: Path, guard: object = None) -> "TokenizedDataset":
        """Documents that `Writer` left in a folder, mapped. `guard` lives as long as they do."""
        about = json.loads((folder / METADATA_FILE).read_text("utf-8"))
        kinds = {**COLUMNS, BOUNDS: np.dtype(np.int64)}
        arrays = {name: map_file(folder / name, kind) for name, kind in kinds.items()}
        listed = folder / BAD_ROWS
        prepared = PreprocessSummary(**about["prepared"], bad_rows=listed if listed.is_file() else None)
        found = TokenizedDataset.__new__(TokenizedDataset)
        found.set_columns(FlatDocuments(arrays, about["names"]), prepared, about)
        found.guard = guard
        return found

    def set_columns(
        self,
        flat: FlatDocuments,
        prepared: PreprocessSummary = PreprocessSummary(),
        about: dict[str, Any] | None = None,
    ) -> None:
        """`about` is what is known of columns that need not be read again."""
        columns = flat.columns
        self.tokens, self.learnt, self.lengths = columns["tokens"], columns["learnt"], columns["lengths"]
        self.whole, self.signs, self.names, self.flat = columns["whole"], columns["signs"], flat.file_names, flat
        self.values = columns["values"]
        self.ends = np.cumsum(columns["valued"], dtype=np.int64) if len(self.values) else None  # of each one's values
        self.bounds = columns[BOUNDS] if BOUNDS in columns else np.append(0, np.cumsum(self.lengths, dtype=np.int64))
        counts = count_targets(columns) if about is None else about
        self.truncated, self.targets = counts["truncated"], counts["targets"]
        self.known: str | None = None if about is None else about["digest"]
        self.prepared, self.guard = prepared, None

    @property
    def fingerprint(self) -> str:
        """Equal for equal tokens, of which the same are learnt, in the same documents of which the same is said."""
        if self.known is not None:
            return self.known
        digest = FingerprintBuilder()
        digest.add(self.flat.columns)
        return digest.hex

    def row_location(self, index: int) -> str:
        """File and row that a document is from."""
        return self.flat.row_location(index)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Document:
        if not 0 <= index < len(self):
            raise IndexError(index)
        part = slice(self.bounds[index], self.bounds[index + 1])
        found = Document(self.tokens[part], self.learnt[part], int(self.whole[index]), DocFlags(int(self.signs[index])))
        if self.ends is None:
            return found
        end, count = int(self.ends[index]), int(self.flat.columns["valued"][index])
        return found._replace(values=self.values[end - count : end])

    def __iter__(self) -> Iterator[Document]:
        return map(self.__getitem__, range(len(self)))


def map_file(file: Path, kind: np.dtype) -> np.ndarray:
    """What a file holds; nothing cannot be mapped."""
    return np.asarray(np.memmap(file, kind, "r")) if file.stat().st_size else np.empty(0, kind)


def is_complete(folder: Path) -> bool:
    """Whether a folder holds all that `Writer` wrote, and not what one of another version did."""
    try:
        about = json.loads((folder / METADATA_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    if about.get("columns") != list(COLUMNS):
        return False
    counts = dict.fromkeys(COLUMNS, about["documents"]) | dict.fromkeys(TOKEN_COLUMNS, about["tokens"])
    counts["values"] = about["values"]
    sizes = {name: count * COLUMNS[name].itemsize for name, count in counts.items()}
    sizes[BOUNDS] = 8 * (about["documents"] + 1)
    return all((folder / name).is_file() and (folder / name).stat().st_size == size for name, size in sizes.items())


class FingerprintBuilder:
    """Of columns that come in parts."""

    def __init__(self) -> None:
        self.sums = {name: hashlib.sha256() for name in ("tokens", "learnt", "lengths")}
        self.said, self.judged = hashlib.sha256(), False

    def add(self, columns: dict[str, np.ndarray]) -> None:
        for name, digest in self.sums.items():
            digest.update(np.ascontiguousarray(columns[name], COLUMNS[name]).data)
        marks = columns["signs"] & int(DocFlags.DESIRABLE | DocFlags.UNDESIRABLE)
        for part in (marks, columns["valued"], columns["values"]):
            self.said.update(np.ascontiguousarray(part).data)
            self.judged |= bool(part.any())

    @property
    def hex(self) -> str:
        sums = [*self.sums.values(), *([self.said] if self.judged else [])]
        return hashlib.sha256("".join(digest.hexdigest() for digest in sums).encode()).hexdigest()


def flatten_documents(documents: Sequence[Document], wheres: Sequence[str]) -> FlatDocuments:
    """Documents and the places of their rows, one after the other."""
    names: dict[str, int] = {}
    places = [split_where(where) for where in wheres]
    values = {
        "tokens": np.concatenate([np.empty(0, np.int32), *(document.tokens for document in documents)]),
        "learnt": np.concatenate([np.empty(0, np.bool_), *(document.loss_mask for document in documents)]),
        "lengths": [len(document.tokens) for document in documents],
        "whole": [document.full_length for document in documents],
        "signs": [int(document.doc_flags) for document in documents],
        "names": [names.setdefault(name, len(names)) for name, _ in places],
        "numbers": [number for _, number in places],
        "valued": [len(document.values) for document in documents],
        "values": np.concatenate([NO_VALUES, *(document.values for document in documents)]),
    }
    return FlatDocuments({name: np.asarray(values[name], kind) for name, kind in COLUMNS.items()}, list(names))


def split_where(where: str) -> tuple[str, int]:
    """A place without the number at its end, and that number; 0 if there is none."""
    match = TRAILING_NUMBER.fullmatch(where)
    assert match is not None
    return match[1], int(match[2] or 0)


def count_targets(columns: dict[str, np.ndarray]) -> dict[str, int]:
    """Documents that were cut, and tokens to learn."""
    lengths, learnt = columns["lengths"], columns["learnt"]
    begins = (np.cumsum(lengths, dtype=np.int64) - lengths)[lengths > 0]
    targets = np.count_nonzero(learnt) - np.count_nonzero(learnt[begins])
    return {"truncated": int((lengths < columns["whole"]).sum()), "targets": int(targets)}


class TokenizedDatasetWriter:
    """Documents into the files of a folder as they come, for `Documents.open`."""

    def __init__(self, folder: Path, form: str = "") -> None:
        self.folder, self.names, self.digest = folder, {}, FingerprintBuilder()
        self.files = {name: (folder / name).open("wb") for name in (*COLUMNS, BOUNDS)}
        self.files[BOUNDS].write(np.zeros(1, np.int64).data)
        self.counts = {"documents": 0, "tokens": 0, "values": 0, "targets": 0, "truncated": 0}
        self.prepared = PreprocessSummary(row_format=form)

    def __enter__(self) -> "TokenizedDatasetWriter":
        return self

    def __exit__(self, *error: object) -> None:
        for file in self.files.values():
            file.raw.close()  # what is buffered is lost with a write that failed, and is flushed before by `finish`

    def add(self, part: TokenizedChunk) -> None:
        """Behind what is there already. Faults go into a list."""
        columns = dict(part.flat.columns)
        own = [self.names.setdefault(name, len(self.names)) for name in part.flat.file_names]
        columns["names"] = np.array(own, np.int32)[columns["names"]]
        columns[BOUNDS] = np.cumsum(columns["lengths"], dtype=np.int64) + self.counts["tokens"]
        for name, file in self.files.items():
            file.write(columns[name].data)
        sizes = {"documents": "lengths", "tokens": "tokens", "values": "values"}
        found = {name: len(columns[column]) for name, column in sizes.items()} | count_targets(columns)
        self.counts = {name: value + found[name] for name, value in self.counts.items()}
        self.digest.add(columns)
        self.prepared = self.prepared.add_chunk(part)
        if part.bad_rows:
            with (self.folder / BAD_ROWS).open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(fault._asdict(), ensure_ascii=True) + "\n" for fault in part.bad_rows)

    @property
    def size(self) -> int:
        """Bytes written."""
        return sum(file.tell() for file in self.files.values())

    def finish(self, **told: Any) -> None:
        """All is there. `told` is kept beside it, for people."""
        for file in self.files.values():
            file.flush()
        counts = {name: value for name, value in asdict(self.prepared).items() if name != "bad_rows"}
        about = {**told, **self.counts, "digest": self.digest.hex, "prepared": counts, "names": list(self.names)}
        about["columns"] = list(COLUMNS)
        (self.folder / METADATA_FILE).write_text(json.dumps(about), "utf-8")
