"""Reader of CSV files. Errors have the file and line."""

import codecs
import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tunekit.data.readers.filesystem import RowFile, skip_bytes
from tunekit.data.readers.row_reader import MAX_ROW_BYTES, BadRow, FileOffset, Row, RowChunk
from tunekit.data.readers.text_lines import check_blank, chunked, open_text, row_too_long, split_lines
from tunekit.errors import UserError

JSON_START = re.compile(r"\s*[\[{]\s*(?:[\"{\[]|$)")  # of an object or a list, unlike that of a column `[id]`


class CsvRecord(NamedTuple):
    """A CSV record: its position, and its values or an error message."""

    offset: int
    length: int  # bytes
    line: int
    values: list[str] | str


@dataclass(frozen=True)
class CsvChunk:
    """Records and their column names."""

    name: str
    position: FileOffset
    header: list[str]
    records: tuple[CsvRecord, ...]

    @property
    def count(self) -> int:
        return len(self.records)

    def rows(self) -> Iterator[Row | BadRow]:
        for record in self.records:
            yield self.to_row(f"{self.name}:{record.line}", record.values)

    def to_row(self, where: str, values: list[str] | str) -> Row | BadRow:
        if isinstance(values, str):
            return BadRow(where, f"malformed CSV: {values}")
        if len(values) != len(self.header):
            return BadRow(where, f"must have {len(self.header)} columns, as in the header, got {len(values)}")
        try:
            "".join(values).encode()
        except UnicodeEncodeError:  # invalid bytes were decoded to lone surrogates
            return BadRow(where, "not UTF-8. Save the file as UTF-8.")
        return Row(where, dict(zip(self.header, values, strict=True)))


@dataclass(frozen=True)
class CsvFile(RowFile):
    """A CSV file with a header. Values are strings.

    Records are split where the file is read, not in workers: quoted values may contain line breaks, so the start of a
    record depends on all quotes before it.
    """

    def chunks(self, position: FileOffset) -> Iterator[RowChunk]:
        csv.field_size_limit(MAX_ROW_BYTES)  # the default is 128 KiB, which is less than long documents
        with open_text(self.file) as file:
            lines = CsvLines(file, self.file.name, 0, 1)
            header = self.read_header(lines)
            if position.offset:
                skip_bytes(file, self.file.name, max(position.offset - lines.offset, 0))
                lines = CsvLines(file, self.file.name, position.offset, position.line)
            for records in chunked(lines.records(), lambda record: record.length):
                position = position._replace(offset=records[0].offset, line=records[0].line)
                yield CsvChunk(self.file.name, position, header, tuple(records))
                position = position._replace(row=position.row + len(records))

    def read_header(self, lines: "CsvLines") -> list[str]:
        """Read the column names; an empty list if the file is empty."""
        for record in lines.records():
            where, names = f"{self.file.name}:{record.line}", record.values
            if isinstance(names, str):
                raise UserError(f"{where}: malformed CSV: {names}")
            if JSON_START.match(names[0]):
                raise UserError(f"{where}: the header is {names[0][:60]!r}. If the file has JSON rows, name it .jsonl.")
            if len(names) == 1 and (delimiter := next((c for c in ";\t|" if c in names[0]), None)):
                problem = f"the header has one column {names[0][:60]!r}, which contains {delimiter!r}"
                raise UserError(f"{where}: {problem}. Use commas as delimiters.")
            if duplicates := [name for name in names if names.count(name) > 1]:
                raise UserError(f"{where}: duplicate column {duplicates[0]!r} in the header")
            return names
        return []


class CsvLines:
    """Line iterator for the csv module that counts lines and bytes. Invalid UTF-8 becomes lone surrogates."""

    def __init__(self, file: io.BufferedReader, name: str, offset: int, line: int) -> None:
        self.lines, self.offset, self.line, self.name = split_lines(file, name, line), offset, line, name
        self.start, self.start_line = offset, line  # of the record that is being read

    def __iter__(self) -> "CsvLines":
        return self

    def __next__(self) -> str:
        raw = next(self.lines)
        text = (raw.removeprefix(codecs.BOM_UTF8) if self.offset == 0 else raw).decode("utf-8", "surrogateescape")
        self.offset, self.line = self.offset + len(raw), self.line + 1
        if self.offset - self.start > MAX_ROW_BYTES:
            raise row_too_long(f"{self.name}:{self.start_line}")
        return text

    def records(self) -> Iterator[CsvRecord]:
        """Yield the remaining records. Blank lines are skipped."""
        reader, last = csv.reader(self, strict=True), self.offset
        while True:
            offset, line = self.start, self.start_line = self.offset, self.line
            try:
                values = next(reader, None)
            except csv.Error as error:
                values = str(error)
            if values is None:
                return
            if values:
                yield CsvRecord(offset, self.offset - offset, line, values)
                last = self.offset
            check_blank(f"{self.name}:{line}", self.offset - last)
