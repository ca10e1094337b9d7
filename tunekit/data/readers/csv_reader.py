"""Rows of CSV files. What cannot be read is told with file and line."""

import codecs
import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tunekit.data.readers.filesystem import RowFile, skip_bytes
from tunekit.data.readers.row_reader import BadRow, FileOffset, Row, RowChunk
from tunekit.data.readers.text_lines import LONGEST, check_first_rows, chunked, open_text, split_lines
from tunekit.errors import UserError

OTHERS = ";\t|"  # what some write in place of commas


class CsvRecord(NamedTuple):
    """Values of a CSV record, or why it has none; where it begins and how many bytes it takes."""

    offset: int
    length: int
    line: int
    values: list[str] | str


@dataclass(frozen=True)
class CsvChunk:
    """Records and the names of their columns."""

    name: str
    place: FileOffset
    header: list[str]
    records: tuple[CsvRecord, ...]

    @property
    def count(self) -> int:
        return len(self.records)

    def rows(self) -> Iterator[Row | BadRow]:
        for record in self.records:
            yield self.row(f"{self.name}:{record.line}", record.values)

    def row(self, where: str, values: list[str] | str) -> Row | BadRow:
        if isinstance(values, str):
            return BadRow(where, f"malformed CSV: {values}")
        if len(values) != len(self.header):
            return BadRow(where, f"the header names {len(self.header)} columns, this row has {len(values)}")
        try:
            "".join(values).encode()
        except UnicodeEncodeError:  # bytes that are no UTF-8 were decoded to lone surrogates
            return BadRow(where, "not UTF-8; save the file as UTF-8")
        return Row(where, dict(zip(self.header, values, strict=True)))


@dataclass(frozen=True)
class CsvFile(RowFile):
    """One row a record; the first record names the columns. Values stay strings.

    Records are told apart where the file is read: only who knows all quotes before a line knows whether one begins.
    """

    def chunks(self, place: FileOffset) -> Iterator[RowChunk]:
        csv.field_size_limit(LONGEST)  # the module refuses fields over 128 KiB, which documents are
        with open_text(self.file) as file:
            top = CsvLines(file, self.file.name, 0, 1)
            header, first = self.header(top), place.offset == 0
            skip_bytes(file, self.file.name, max(place.offset - top.offset, 0))
            rest = top if first else CsvLines(file, self.file.name, place.offset, place.line)
            for records in chunked(rest.records(), lambda record: record.length):
                place = place._replace(offset=records[0].offset, line=records[0].line)
                chunk = CsvChunk(self.file.name, place, header, tuple(records))
                if first:
                    check_first_rows(chunk, "records as the header has them, with commas between values")
                yield chunk
                first, place = False, place._replace(row=place.row + chunk.count)

    def header(self, text: "CsvLines") -> list[str]:
        """Names of the columns; none, if the file is empty."""
        for record in text.records():
            where, names = f"{self.file.name}:{record.line}", record.values
            if isinstance(names, str):
                raise UserError(f"{where}: malformed CSV: {names}")
            twice = [name for name in names if names.count(name) > 1]
            other = next((mark for mark in OTHERS if len(names) == 1 and mark in names[0]), None)
            if other is not None:
                told = f"the header is one column, {names[0][:60]!r}: are its names separated by {other!r}?"
                raise UserError(f"{where}: {told} Save the file with commas")
            if twice:
                raise UserError(f"{where}: the header names the column {twice[0]!r} twice")
            return names
        return []


class CsvLines:
    """Lines of a file as the csv module wants them, counted. Bytes that are no UTF-8 become lone surrogates."""

    def __init__(self, file: io.BufferedReader, name: str, offset: int, line: int) -> None:
        self.lines, self.offset, self.line = split_lines(file, name, line), offset, line

    def __iter__(self) -> "CsvLines":
        return self

    def __next__(self) -> str:
        raw = next(self.lines)
        text = (raw.removeprefix(codecs.BOM_UTF8) if self.offset == 0 else raw).decode("utf-8", "surrogateescape")
        self.offset, self.line = self.offset + len(raw), self.line + 1
        return text

    def records(self) -> Iterator[CsvRecord]:
        """What is left of the file; blank lines are passed over."""
        reader = csv.reader(self, strict=True)
        while True:
            offset, line = self.offset, self.line
            try:
                values = next(reader, None)
            except csv.Error as error:
                values = str(error)
            if values is None:
                return
            if values:
                yield CsvRecord(offset, self.offset - offset, line, values)
