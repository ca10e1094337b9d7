"""Reader of JSON and JSON Lines files. Lists are streamed, so they may be larger than memory."""

import codecs
import io
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tunekit.data.readers.filesystem import DataFile, RowFile, skip_bytes, wrap_read_errors
from tunekit.data.readers.row_reader import (
    CHUNK_BYTES,
    MAX_ROW_BYTES,
    BadRow,
    FileOffset,
    FileShard,
    Row,
    RowChunk,
    UnreadableCell,
    json_type,
)
from tunekit.data.readers.text_lines import (
    BLANK,
    check_blank,
    chunked,
    decode_utf8,
    open_text,
    row_too_long,
    split_lines,
)
from tunekit.errors import UserError

WHITESPACE = re.compile(r"[ \t\r\n\ufeff]*")
# Finds the end of a value. Numbers are not converted, so that one with too many digits fails for its row only.
DECODER = json.JSONDecoder(parse_int=str, parse_float=str)
JSON_WHITESPACE = " \t\r\n"
MAX_OBJECT_BYTES = 2**29  # of a file with one object, which is read into memory
LOOKAHEAD = 16  # characters; an error this close to the end of a block may only be due to missing input


def parse_bytes(raw: bytes) -> Any:
    """Parse a JSON value. Raise ValueError with the reason if it is malformed."""
    text = decode_utf8(raw).rstrip(JSON_WHITESPACE)  # so that errors at the end have the column of this line
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(malformed_message(error.msg, error.colno)) from None
    except RecursionError as error:
        raise ValueError(f"unreadable JSON: {error}") from None
    except ValueError:  # an integer of more digits than Python converts
        value = json.loads(text, parse_int=parse_integer)
    return {key: mark_unreadable(key, item) for key, item in value.items()} if isinstance(value, dict) else value


def parse_integer(digits: str) -> int | UnreadableCell:
    """Parse an integer. Python limits the digits, because parsing takes quadratic time."""
    limit = sys.get_int_max_str_digits()
    return int(digits) if len(digits) <= limit else UnreadableCell("", f"it has a number of {len(digits):,} digits")


def mark_unreadable(key: str, value: Any) -> Any:
    """Return the value of a column; an UnreadableCell if there is one in it."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, UnreadableCell):
            return UnreadableCell(key, item.reason)
        pending += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
    return value


def malformed_message(reason: str, column: int) -> str:
    return f"malformed JSON: {reason.removesuffix(' at')} at column {column}"


def to_row(where: str, raw: bytes) -> Row | BadRow:
    """Parse a row, which must be a JSON object."""
    if len(raw) > MAX_ROW_BYTES:
        return BadRow(where, f"the row is longer than {MAX_ROW_BYTES >> 20} MB")
    try:
        value = parse_bytes(raw)
    except ValueError as error:
        return BadRow(where, str(error))
    if not isinstance(value, dict):
        return BadRow(where, f"row must be a JSON object, got {json_type(value)}")
    return Row(where, value)


@dataclass(frozen=True)
class JsonChunk:
    """Unparsed JSON values, numbered from `position.line`. Blank ones are skipped."""

    name: str  # location prefix: "rows.jsonl:" or "rows.json row "
    position: FileOffset
    count: int
    texts: tuple[bytes, ...]

    def rows(self) -> Iterator[Row | BadRow]:
        for number, text in enumerate(self.texts, self.position.line):
            if text.strip(BLANK):
                yield to_row(f"{self.name}{number}", text)


@dataclass(frozen=True)
class JsonLinesFile(RowFile):
    """JSON Lines: one object per line."""

    def chunks(self, position: FileOffset) -> Iterator[RowChunk]:
        name = self.file.name
        with open_text(self.file) as file:
            skip_bytes(file, name, position.offset)
            last = position.offset
            for group in chunked(split_lines(file, name, position.line), len):
                texts = tuple(group)
                count = sum(1 for text in texts if text.strip(BLANK))
                yield JsonChunk(f"{name}:", position, count, texts)
                position = position.advance(count, position.offset + sum(map(len, texts)), len(texts))
                last = position.offset if count else last
                check_blank(f"{name}:{position.line}", position.offset - last)


@dataclass(frozen=True)
class JsonFile(RowFile):
    """A JSON file with a list of objects, an object with such a list as `data`, one object, or JSON Lines.

    The layout is detected: many `.json` files are JSON Lines, and some `.jsonl` files (`lines`) are lists.
    """

    lines: bool = False

    def detect_layout(self) -> FileShard:
        """Return the reader for the layout of this file."""
        with open_text(self.file) as file, wrap_read_errors(self.file.name):
            first, num_blank = b" ", 0
            while first and first in BLANK:
                first, num_blank = file.read(1), num_blank + 1
                check_blank(self.file.name, num_blank)
            if first == b"[":
                return JsonListFile(self.file)
            if self.lines or (is_value(first + file.readline(MAX_ROW_BYTES)) and file.read(CHUNK_BYTES).strip(BLANK)):
                return JsonLinesFile(self.file)
        return JsonObjectFile(self.file) if first else JsonLinesFile(self.file)

    def count(self, limit: int | None) -> int:
        return self.detect_layout().count(limit)

    def chunks(self, position: FileOffset) -> Iterator[RowChunk]:
        return self.detect_layout().chunks(position)


@dataclass(frozen=True)
class JsonListFile(RowFile):
    """A list of objects, split into elements while it is read. Offsets are bytes."""

    def chunks(self, position: FileOffset) -> Iterator[RowChunk]:
        with open_text(self.file) as file:
            skip_bytes(file, self.file.name, position.offset)
            elements = iter(JsonElements(self.file, file, position))
            for group in chunked(elements, lambda element: len(element.text)):
                texts = tuple(element.text for element in group)
                yield JsonChunk(f"{self.file.name} row ", position, len(texts), texts)
                position = position.advance(len(texts), group[-1].end)


@dataclass(frozen=True)
class JsonObjectFile(RowFile):
    """One object: a row, or a list of rows as `data`. It is read into memory. Offsets are rows."""

    def count(self, limit: int | None) -> int:
        return len(self.texts())

    def chunks(self, position: FileOffset) -> Iterator[RowChunk]:
        for group in chunked(self.texts()[position.offset :], len):
            yield JsonChunk(f"{self.file.name} row ", position, len(group), tuple(group))
            position = position.advance(len(group))

    def texts(self) -> list[bytes]:
        with open_text(self.file) as file, wrap_read_errors(self.file.name):
            raw = file.read(MAX_OBJECT_BYTES + 1)
        if len(raw) > MAX_OBJECT_BYTES:
            problem = f"one JSON object of more than {MAX_OBJECT_BYTES >> 20} MB"
            raise UserError(f"{self.file.name} row 1: {problem}. Use a list of rows, or JSON Lines.")
        try:
            value = json.loads(decode_utf8(raw).rstrip(JSON_WHITESPACE))
        except json.JSONDecodeError as error:
            raise UserError(f"{self.file.name}:{error.lineno}: {malformed_message(error.msg, error.colno)}") from None
        except (RecursionError, ValueError) as error:
            raise UserError(f"{self.file.name}: unreadable JSON: {error}") from None
        if not isinstance(value, dict):
            expected = 'expected a list of rows or {"data": [rows]}'
            raise UserError(f"{self.file.name}: {expected}, got {json_type(value)}")
        rows = value["data"] if isinstance(value.get("data"), list) else [value]
        return [json.dumps(row).encode() for row in rows]


class JsonElement(NamedTuple):
    """An unparsed element of a list, and the offset after the comma or bracket that follows it."""

    text: bytes
    end: int


class JsonElements:
    """Iterator over the elements of a JSON list. `text` is a block of the file, or more if an element is longer.

    `offset` is the offset of `text[index]` in the file.
    """

    def __init__(self, source: DataFile, file: io.BufferedReader, position: FileOffset) -> None:
        self.source, self.file, self.offset, self.row = source, file, position.offset, position.line
        # Invalid UTF-8 becomes lone surrogates, which `to_bytes` converts back.
        self.decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self.text, self.index, self.ended = "", 0, False

    @property
    def where(self) -> str:
        return f"{self.source.name} row {self.row}"

    def __iter__(self) -> Iterator[JsonElement]:
        delimiter = ","
        if self.offset == 0:
            self.peek()
            self.advance(self.index + 1)  # the bracket
            delimiter = self.peek()
            self.advance(self.index + (delimiter == "]"))
        while delimiter != "]":
            text = self.read_value()
            delimiter = self.peek()
            if delimiter not in (",", "]"):
                raise self.make_error("Expecting ',' delimiter" if delimiter else "list is not closed", self.index)
            self.advance(self.index + 1)
            self.row += 1
            yield JsonElement(text, self.offset)
        if self.peek():
            raise self.make_error("extra data after the list", self.index)

    def peek(self) -> str:
        """Skip whitespace, and return the next character, or '' at the end of the file. Reads blocks as needed."""
        start = self.offset
        while True:
            self.advance(end_of_whitespace(self.text, self.index))
            if self.index < len(self.text) or self.ended:
                return self.text[self.index : self.index + 1]
            check_blank(self.where, self.offset - start)
            self.read_block()

    def read_value(self) -> bytes:
        """Return the next value as text, reading blocks as needed."""
        self.peek()
        while (end := self.find_end()) is None:
            self.read_block()
        text = to_bytes(self.text[self.index : end])
        self.advance(end)
        return text

    def find_end(self) -> int | None:
        """Return the end of the next value; None if more input is needed."""
        try:
            end = DECODER.raw_decode(self.text, self.index)[1]
        except json.JSONDecodeError as error:
            certain = error.pos < len(self.text) - LOOKAHEAD and not error.msg.startswith("Unterminated string")
            if certain or self.ended:
                raise self.make_error(error.msg, error.pos) from None
            return None
        except RecursionError as error:
            raise self.make_error(str(error), self.index) from None
        return end if end < len(self.text) or self.ended else None  # a number may continue

    def advance(self, end: int) -> None:
        self.offset += len(to_bytes(self.text[self.index : end]))
        self.index = end

    def read_block(self) -> None:
        if len(self.text) - self.index > MAX_ROW_BYTES:
            raise row_too_long(self.where)
        with wrap_read_errors(self.source.name):
            block = self.file.read(max(CHUNK_BYTES, len(self.text) - self.index))
        self.ended = not block
        self.text, self.index = self.text[self.index :] + self.decoder.decode(block, self.ended), 0

    def make_error(self, reason: str, index: int) -> UserError:
        line, column = line_and_column(self.source, self.offset + len(to_bytes(self.text[self.index : index])))
        return UserError(f"{self.source.name}:{line}: {malformed_message(reason, column)}")


def to_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def end_of_whitespace(text: str, index: int) -> int:
    match = WHITESPACE.match(text, index)
    assert match is not None
    return match.end()


def is_value(text: bytes) -> bool:
    """Whether a byte string is a JSON value."""
    try:
        parse_bytes(text)
    except ValueError:
        return False
    return True


def line_and_column(source: DataFile, offset: int) -> tuple[int, int]:
    """Return the line and column of an offset, for error messages. Reads the file again up to the offset."""
    line, column = 1, 1
    with source.open() as file:
        while offset > 0 and (block := file.read(min(offset, CHUNK_BYTES))):
            offset -= len(block)
            line += block.count(b"\n")
            column = len(block) - block.rfind(b"\n") if b"\n" in block else column + len(block)
    return line, column
