"""Rows of JSON, JSON-lines and CSV files. What cannot be read is told with file and line."""

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tunekit.data.table import Row, Table
from tunekit.errors import UserError


def decode(raw: bytes, where: str) -> str:
    """Text of UTF-8 bytes, a byte order mark at their beginning left out."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: not UTF-8 (byte 0x{raw[error.start]:02x} at {error.start}); save it as UTF-8"
        ) from None


def parse(text: str, where: str) -> Any:
    """The value of a JSON text; `where` names the text in messages."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: malformed JSON: {error.msg} at column {error.colno}") from None
    except (RecursionError, ValueError) as error:  # ValueError: an integer of more digits than Python converts
        raise UserError(f"{where}: unreadable JSON: {error}") from None


def row(where: str, value: Any) -> Row:
    """A row of a JSON value, which must be an object."""
    if not isinstance(value, dict):
        raise UserError(f"{where}: a row must be a JSON object, this is {type(value).__name__}")
    return Row(where, value)


def json_lines(path: Path) -> Table:
    """One object a line; blank lines are passed over."""
    with path.open("rb") as file:
        count = sum(1 for line in file if line.strip())
    return Table(count, json_line_rows(path))


def json_line_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}:{number}"
                yield row(where, parse(decode(line, where), where))


def json_file(path: Path) -> Table:
    """A list of objects, or such a list under `data`. Many files named `.json` hold JSON lines: these are read too."""
    text = decode(path.read_bytes(), str(path))
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return json_lines(path)
        raise UserError(f"{path}:{error.lineno}: malformed JSON: {error.msg} at column {error.colno}") from None
    except (RecursionError, ValueError) as error:
        raise UserError(f"{path}: unreadable JSON: {error}") from None
    if isinstance(value, dict):
        if not isinstance(value.get("data"), list):
            return Table(1, iter([Row(f"{path}:1", value)]))
        value = value["data"]
    if not isinstance(value, list):
        raise UserError(f'{path}: want a list of rows or {{"data": [rows]}}, this is {type(value).__name__}')
    return Table(len(value), (row(f"{path} row {number}", item) for number, item in enumerate(value, 1)))


def csv_file(path: Path) -> Table:
    """One row a record; the first record names the columns. Values stay strings."""
    csv.field_size_limit(sys.maxsize)  # the module refuses fields over 128 KiB, which documents are
    count = sum(1 for _ in csv_rows(path))
    return Table(count, csv_rows(path))


def csv_rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader, line = csv.DictReader(file, strict=True), 1
        try:
            for fields in reader:
                start, line = line + 1, reader.line_num
                yield csv_row(f"{path}:{start}", fields)
        except csv.Error as error:
            raise UserError(f"{path}:{line + 1}: malformed CSV: {error}") from None
        except UnicodeDecodeError as error:
            raise UserError(f"{path}:{line + 1}: not UTF-8 ({error.reason}); save it as UTF-8") from None


def csv_row(where: str, fields: dict[Any, Any]) -> Row:
    if None in fields or None in fields.values():
        raise UserError(f"{where}: the row and the header differ in their number of columns")
    return Row(where, fields)
