"""Rows of a JSON file: a list of any size, which is not read whole; an object; or JSON lines under another name."""

import codecs
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tunekit.data.readers.filesystem import TROUBLE, DataFile, RowFile, read_error, skip_bytes
from tunekit.data.readers.row_reader import BYTES, BadRow, FileOffset, FileShard, Row, RowChunk
from tunekit.data.readers.text_lines import (
    BLANK,
    LONGEST,
    check_first_rows,
    chunked,
    decode_utf8,
    open_text,
    split_lines,
)
from tunekit.errors import UserError

WHITE = re.compile(r"[ \t\r\n\ufeff]*")
# Finds where a value ends. Numbers stay text: they are read elsewhere, where one that is too long is a row's fault.
DECODER = json.JSONDecoder(parse_int=str, parse_float=str)
SPACE = " \t\r\n"  # and no other, as JSON has it
NEAR = 16  # characters; what is wrong so close to the end of a block may be right with the next one


def parse(raw: bytes) -> Any:
    """The value of a JSON text; ValueError says why there is none."""
    text = decode_utf8(raw).rstrip(SPACE)  # what is missing is missing in the line, not in the next one
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(malformed(error.msg, error.colno)) from None
    except (RecursionError, ValueError) as error:  # ValueError: an integer of more digits than Python converts
        raise ValueError(f"unreadable JSON: {error}") from None


def malformed(reason: str, column: int) -> str:
    return f"malformed JSON: {reason.removesuffix(' at')} at column {column}"


def json_row(where: str, raw: bytes) -> Row | BadRow:
    """A row of a JSON text, which must be an object."""
    try:
        value = parse(raw)
    except ValueError as error:
        return BadRow(where, str(error))
    if not isinstance(value, dict):
        return BadRow(where, f"a row must be a JSON object, this is {type(value).__name__}")
    return Row(where, value)


@dataclass(frozen=True)
class JsonChunk:
    """Texts of JSON values, numbered from the place's line; blank ones are passed over."""

    name: str  # with what stands before a number: "rows.jsonl:", "rows.json row "
    place: FileOffset
    count: int
    texts: tuple[bytes, ...]

    def rows(self) -> Iterator[Row | BadRow]:
        for number, text in enumerate(self.texts, self.place.line):
            if text.strip(BLANK):
                yield json_row(f"{self.name}{number}", text)


@dataclass(frozen=True)
class JsonLinesFile(RowFile):
    """One object a line."""

    def chunks(self, place: FileOffset) -> Iterator[RowChunk]:
        name = self.file.name
        with open_text(self.file) as file:
            skip_bytes(file, name, place.offset)
            for group in chunked(split_lines(file, name, place.line), len):
                texts = tuple(group)
                count = sum(1 for text in texts if text.strip(BLANK))
                chunk = JsonChunk(f"{name}:", place, count, texts)
                if place.offset == 0:
                    check_first_rows(chunk, "one JSON object a line")
                yield chunk
                after = place.offset + sum(map(len, texts))
                place = FileOffset(place.file, after, place.line + len(texts), place.row + count)


@dataclass(frozen=True)
class JsonFile(RowFile):
    """A list of objects, or such a list under `data` (an object is read whole, a list is not), or one object.

    Many files named `.json` hold JSON lines, and some named `.jsonl` (`lines`) a list: each is read as what it is.
    """

    lines: bool = False

    def part(self) -> FileShard:
        """How this file is to be read."""
        with open_text(self.file) as file:
            try:
                first = b" "
                while first and first in BLANK:
                    first = file.read(1)
                if first == b"[":
                    return JsonListFile(self.file)
                if self.lines or (is_value(first + file.readline(LONGEST)) and file.read(BYTES).strip(BLANK)):
                    return JsonLinesFile(self.file)
            except TROUBLE as error:
                raise read_error(self.file.name, error) from None
        return JsonObjectFile(self.file) if first else JsonLinesFile(self.file)

    def count(self, most: int | None) -> int:
        return self.part().count(most)

    def chunks(self, place: FileOffset) -> Iterator[RowChunk]:
        return self.part().chunks(place)


@dataclass(frozen=True)
class JsonListFile(RowFile):
    """A list of objects, cut into its elements where it is read. Places count bytes."""

    def chunks(self, place: FileOffset) -> Iterator[RowChunk]:
        with open_text(self.file) as file:
            skip_bytes(file, self.file.name, place.offset)
            for group in chunked(iter(JsonElements(self.file, file, place.offset)), lambda element: len(element.text)):
                texts = tuple(element.text for element in group)
                chunk = JsonChunk(f"{self.file.name} row ", place, len(texts), texts)
                if place.offset == 0:
                    check_first_rows(chunk, "a list of JSON objects")
                yield chunk
                place = FileOffset(place.file, group[-1].behind, place.line + len(texts), place.row + len(texts))


@dataclass(frozen=True)
class JsonObjectFile(RowFile):
    """One object, which is a row or has a list of them under `data`. It is read whole. Places count rows."""

    def count(self, most: int | None) -> int:
        return len(self.texts())

    def chunks(self, place: FileOffset) -> Iterator[RowChunk]:
        for group in chunked(self.texts()[place.offset :], len):
            yield JsonChunk(f"{self.file.name} row ", place, len(group), tuple(group))
            rows = len(group)
            place = FileOffset(place.file, place.offset + rows, place.line + rows, place.row + rows)

    def texts(self) -> list[bytes]:
        with open_text(self.file) as file:
            try:
                raw = file.read()
            except TROUBLE as error:
                raise read_error(self.file.name, error) from None
        try:
            text = decode_utf8(raw).rstrip(SPACE)
        except ValueError as error:
            raise UserError(f"{self.file.name}: {error}") from None
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"{self.file.name}:{error.lineno}: {malformed(error.msg, error.colno)}") from None
        except (RecursionError, ValueError) as error:
            raise UserError(f"{self.file.name}: unreadable JSON: {error}") from None
        if not isinstance(value, dict):
            kind = type(value).__name__
            raise UserError(f'{self.file.name}: want a list of rows or {{"data": [rows]}}, this is {kind}')
        rows = value["data"] if isinstance(value.get("data"), list) else [value]
        return [json.dumps(row).encode() for row in rows]


class JsonElement(NamedTuple):
    """A value of a list as it is written, and the offset behind the comma or bracket that follows it."""

    text: bytes
    behind: int


class JsonElements:
    """What a JSON list is made of. The text at hand is a block of the file; more only where one element is longer.

    `offset` is that of `text[at]` in the file.
    """

    def __init__(self, stored: DataFile, file: io.BufferedReader, offset: int) -> None:
        self.stored, self.file, self.offset = stored, file, offset
        # Bytes that are no UTF-8 become lone surrogates, and bytes again when an element is cut out.
        self.decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self.text, self.at, self.ended = "", 0, False

    def __iter__(self) -> Iterator[JsonElement]:
        if self.offset == 0:
            self.take(self.next() + 1)  # the bracket
            if self.next() < len(self.text) and self.text[self.next()] == "]":
                self.take(self.next() + 1)
                return self.close()
        closed = False
        while not closed:
            start, end, comma = self.element()
            closed = self.text[comma] == "]"
            text = encoded(self.text[start:end])
            self.take(comma + 1)
            yield JsonElement(text, self.offset)
        return self.close()

    def element(self) -> tuple[int, int, int]:
        """Where the next one begins and ends, and where the comma or bracket behind it stands."""
        while True:
            start = self.next()
            end = self.end(start)
            comma = None if end is None else after_white(self.text, end)
            if end is not None and comma is not None and comma < len(self.text):
                if self.text[comma] not in ",]":
                    raise self.fault("Expecting ',' delimiter", comma)
                return start, end, comma
            if self.ended:
                raise self.fault("the list does not end", len(self.text))
            self.more()

    def end(self, start: int) -> int | None:
        """Where a value ends; None: not in the text at hand."""
        try:
            return DECODER.raw_decode(self.text, start)[1]
        except json.JSONDecodeError as error:
            certain = error.pos < len(self.text) - NEAR and not error.msg.startswith("Unterminated string")
            if certain or self.ended:
                raise self.fault(error.msg, error.pos) from None
            return None
        except RecursionError as error:
            raise self.fault(str(error), start) from None

    def next(self) -> int:
        """Where there is no white space."""
        while (at := after_white(self.text, self.at)) == len(self.text) and not self.ended:
            self.take(at)
            self.more()
        return at

    def take(self, behind: int) -> None:
        self.offset += len(encoded(self.text[self.at : behind]))
        self.at = behind

    def more(self) -> None:
        if len(self.text) - self.at > LONGEST:
            raise self.fault(f"a row of more than {LONGEST >> 20} MB", self.at)
        try:
            block = self.file.read(max(BYTES, len(self.text) - self.at))
        except TROUBLE as error:
            raise read_error(self.stored.name, error) from None
        self.ended = not block
        self.text, self.at = self.text[self.at :] + self.decoder.decode(block, self.ended), 0

    def close(self) -> None:
        if self.next() < len(self.text):
            raise self.fault("more follows the end of the list", self.next())

    def fault(self, reason: str, at: int) -> UserError:
        line, column = line_of(self.stored, self.offset + len(encoded(self.text[self.at : at])))
        return UserError(f"{self.stored.name}:{line}: {malformed(reason, column)}")


def encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def after_white(text: str, at: int) -> int:
    found = WHITE.match(text, at)
    assert found is not None
    return found.end()


def is_value(text: bytes) -> bool:
    """Whether a text is a JSON value."""
    try:
        parse(text)
    except ValueError:
        return False
    return True


def line_of(stored: DataFile, offset: int) -> tuple[int, int]:
    """Line and column of an offset. The file is read once more: only who must tell of a mistake wants them."""
    line, column = 1, 1
    with stored.open() as file:
        while offset > 0 and (block := file.read(min(offset, BYTES))):
            offset -= len(block)
            line += block.count(b"\n")
            column = len(block) - block.rfind(b"\n") if b"\n" in block else column + len(block)
    return line, column
