"""Rows of JSON-lines and CSV files. What cannot be read is told with file and line."""

import codecs
import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from tunekit.data.storage import TROUBLE, Stored, skip, unreadable
from tunekit.data.table import BYTES, ROWS, Chunk, Fault, Part, Place, Row
from tunekit.errors import UserError

Item = TypeVar("Item")
LONGEST = 2**28  # bytes of a row; more is a file of another kind, and would fill the memory
BLANK = b" \t\r\n\v\f\xef\xbb\xbf"  # white space and byte order marks
FIRST = 10  # rows; a file none of which can be read is no file of rows


def decode(raw: bytes) -> str:
    """Text of UTF-8 bytes, a byte order mark at their beginning left out; ValueError says which byte is none."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte 0x{raw[error.start]:02x} at {error.start}); save it as UTF-8") from None


def parse(raw: bytes) -> Any:
    """The value of a JSON text; ValueError says why there is none."""
    text = decode(raw)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"malformed JSON: {error.msg} at column {error.colno}") from None
    except (RecursionError, ValueError) as error:  # ValueError: an integer of more digits than Python converts
        raise ValueError(f"unreadable JSON: {error}") from None


def json_row(where: str, raw: bytes) -> Row | Fault:
    """A row of a JSON text, which must be an object."""
    try:
        value = parse(raw)
    except ValueError as error:
        return Fault(where, str(error))
    if not isinstance(value, dict):
        return Fault(where, f"a row must be a JSON object, this is {type(value).__name__}")
    return Row(where, value)


@dataclass(frozen=True)
class JsonChunk:
    """Texts of JSON values, numbered from the place's line; blank ones are passed over."""

    name: str  # with what stands before a number: "rows.jsonl:", "rows.json row "
    place: Place
    count: int
    texts: tuple[bytes, ...]

    def rows(self) -> Iterator[Row | Fault]:
        for number, text in enumerate(self.texts, self.place.line):
            if text.strip(BLANK):
                yield json_row(f"{self.name}{number}", text)


@dataclass(frozen=True)
class JsonLines:
    """One object a line."""

    file: Stored

    def count(self, most: int | None) -> int:
        return counted(self, most)

    def chunks(self, place: Place) -> Iterator[Chunk]:
        name = self.file.name
        with opened(self.file) as file:
            skip(file, name, place.offset)
            for group in groups(lines(file, name, place.line), len):
                texts = tuple(group)
                count = sum(1 for text in texts if text.strip(BLANK))
                chunk = JsonChunk(f"{name}:", place, count, texts)
                if place.offset == 0:
                    refuse_rubbish(chunk)
                yield chunk
                after = place.offset + sum(map(len, texts))
                place = Place(place.file, after, place.line + len(texts), place.row + count)

    def digest(self, whole: bool) -> bytes:
        return self.file.digest(whole)


class Record(NamedTuple):
    """Values of a CSV record, or why it has none; where it begins and how many bytes it takes."""

    offset: int
    length: int
    line: int
    values: list[str] | str


@dataclass(frozen=True)
class CsvChunk:
    """Records and the names of their columns."""

    name: str
    place: Place
    header: list[str]
    records: tuple[Record, ...]

    @property
    def count(self) -> int:
        return len(self.records)

    def rows(self) -> Iterator[Row | Fault]:
        for record in self.records:
            yield self.row(f"{self.name}:{record.line}", record.values)

    def row(self, where: str, values: list[str] | str) -> Row | Fault:
        if isinstance(values, str):
            return Fault(where, f"malformed CSV: {values}")
        if len(values) != len(self.header):
            return Fault(where, f"{len(values)} values, but the header names {len(self.header)} columns")
        try:
            "".join(values).encode()
        except UnicodeEncodeError:  # bytes that are no UTF-8 were decoded to lone surrogates
            return Fault(where, "not UTF-8; save the file as UTF-8")
        return Row(where, dict(zip(self.header, values, strict=True)))


@dataclass(frozen=True)
class Csv:
    """One row a record; the first record names the columns. Values stay strings.

    Records are told apart where the file is read: only who knows all quotes before a line knows whether one begins.
    """

    file: Stored

    def count(self, most: int | None) -> int:
        return counted(self, most)

    def chunks(self, place: Place) -> Iterator[Chunk]:
        csv.field_size_limit(LONGEST)  # the module refuses fields over 128 KiB, which documents are
        with opened(self.file) as file:
            top = Text(file, self.file.name, 0, 1)
            header, first = self.header(top), place.offset == 0
            skip(file, self.file.name, max(place.offset - top.offset, 0))
            rest = top if first else Text(file, self.file.name, place.offset, place.line)
            for records in groups(rest.records(), lambda record: record.length):
                place = place._replace(offset=records[0].offset, line=records[0].line)
                chunk = CsvChunk(self.file.name, place, header, tuple(records))
                if first:
                    refuse_rubbish(chunk)
                yield chunk
                first, place = False, place._replace(row=place.row + chunk.count)

    def header(self, text: "Text") -> list[str]:
        """Names of the columns; none, if the file is empty."""
        for record in text.records():
            where, names = f"{self.file.name}:{record.line}", record.values
            if isinstance(names, str):
                raise UserError(f"{where}: malformed CSV: {names}")
            twice = [name for name in names if names.count(name) > 1]
            if twice:
                raise UserError(f"{where}: the header names the column {twice[0]!r} twice")
            return names
        return []

    def digest(self, whole: bool) -> bytes:
        return self.file.digest(whole)


class Text:
    """Lines of a file as the csv module wants them, counted. Bytes that are no UTF-8 become lone surrogates."""

    def __init__(self, file: io.BufferedReader, name: str, offset: int, line: int) -> None:
        self.lines, self.offset, self.line = lines(file, name, line), offset, line

    def __iter__(self) -> "Text":
        return self

    def __next__(self) -> str:
        raw = next(self.lines)
        text = (raw.removeprefix(codecs.BOM_UTF8) if self.offset == 0 else raw).decode("utf-8", "surrogateescape")
        self.offset, self.line = self.offset + len(raw), self.line + 1
        return text

    def records(self) -> Iterator[Record]:
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
                yield Record(offset, self.offset - offset, line, values)


def opened(file: Stored) -> io.BufferedReader:
    """A file at its beginning, which must be text."""
    try:
        opened = file.open()
        head = opened.peek(1)[:1024]
    except TROUBLE as error:
        raise unreadable(file.name, error) from None
    if head.startswith(b"\x1f\x8b"):
        raise UserError(f"{file.name}: is packed with gzip; give it a name that ends in .gz")
    if b"\0" in head.partition(b"\n")[0]:
        raise UserError(f"{file.name}: is no UTF-8 text: it is binary, or UTF-16")
    return opened


def lines(file: io.BufferedReader, name: str, number: int) -> Iterator[bytes]:
    """Lines with their ends; `number` is that of the first."""
    try:
        for line in iter(partial(file.readline, LONGEST), b""):
            if len(line) == LONGEST:
                raise UserError(f"{name}:{number}: a line of more than {LONGEST >> 20} MB: not a file of rows")
            yield line
            number += 1
    except TROUBLE as error:
        raise unreadable(f"{name}:{number}", error) from None


def groups(items: Iterable[Item], length_of: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Items in lists that make a chunk each."""
    group: list[Item] = []
    size = 0
    for item in items:
        length = length_of(item)
        if group and (len(group) == ROWS or size + length > BYTES):
            yield group
            group, size = [], 0
        group.append(item)
        size += length
    if group:
        yield group


def counted(part: Part, most: int | None) -> int:
    """Rows of a file that tells how many only to who reads it, up to `most`."""
    count = 0
    for chunk in part.chunks(Place()):
        count += chunk.count
        if most is not None and count >= most:
            return most
    return count


def refuse_rubbish(chunk: Chunk) -> None:
    """UserError for a file that begins with many rows, none of which can be read: rows are another thing."""
    found = list(islice(chunk.rows(), FIRST))
    faults = [row for row in found if isinstance(row, Fault)]
    if len(faults) == FIRST:
        raise UserError(f"{faults[0].where}: {faults[0].reason}; nor can any of the {FIRST - 1} rows after it be read")
