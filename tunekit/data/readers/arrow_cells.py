"""Python values of Arrow columns. Values that Python cannot represent, or that are too large, are UnreadableCells."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyarrow

from tunekit.data.readers.row_reader import MAX_ROW_BYTES, UnreadableCell

JSON_EXTENSION = "arrow.json"  # extension type of JSON strings, which `datasets` uses for values of mixed types
# Exceptions of Python types, of time zones and of pandas, for values that they cannot represent.
CONVERSION_ERRORS = (
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RuntimeError,
    ImportError,
    pyarrow.ArrowException,
)
VIEW_BYTES = 16  # size of an element of a view; its first four bytes are the length of the text


def read_cells(name: str, column: pyarrow.Array) -> list[Any]:
    """Values of a column, converted together, or one by one if one of them cannot be converted or may be too large."""
    convert = make_converter(column.type)
    try:
        if unfolded_bytes(column) <= MAX_ROW_BYTES:
            return [convert(value) for value in to_pylist(column)]
    except CONVERSION_ERRORS:
        pass  # found again below
    return [read_cell(name, column.slice(index, 1), convert) for index in range(len(column))]


def read_cell(name: str, column: pyarrow.Array, convert: Callable[[Any], Any]) -> Any:
    """Value of a column with one row."""
    try:
        if isinstance(column, pyarrow.DictionaryArray):  # whose size does not include its other values
            column = column.dictionary.slice(column.indices[0].as_py(), 1) if column.is_valid()[0].as_py() else column
        if (size := unfolded_bytes(column)) > MAX_ROW_BYTES:
            return UnreadableCell(name, f"{size >> 20:,} MB, more than {MAX_ROW_BYTES >> 20} MB")
        return convert(to_pylist(column)[0])
    except CONVERSION_ERRORS as error:
        return UnreadableCell(name, f"{column.type}: {first_line(error)}")


def to_pylist(column: pyarrow.Array) -> list[Any]:
    """Python values of an array. Rows with the same entry of a dictionary share one object."""
    if not isinstance(column, pyarrow.DictionaryArray):
        return column.to_pylist()
    used = column.indices.drop_null().unique()
    values = dict(zip(used.to_pylist(), to_pylist(column.dictionary.take(used)), strict=True))
    return [None if index is None else values[index] for index in column.indices.to_pylist()]


def unfolded_bytes(column: pyarrow.Array) -> int:
    """Bytes of the values of an array. Bytes that values share are counted for each: of a view or a dictionary.

    Entries of a dictionary count as if they had the same length.
    """
    if isinstance(column, pyarrow.DictionaryArray):
        return len(column) * unfolded_bytes(column.dictionary) // max(len(column.dictionary), 1)
    if pyarrow.types.is_string_view(column.type) or pyarrow.types.is_binary_view(column.type):
        views = column.buffers()[1]
        lengths = np.frombuffer(views, np.int32, len(column) * VIEW_BYTES // 4, column.offset * VIEW_BYTES)[::4]
        return int(lengths.sum(dtype=np.int64))
    return column.nbytes


def make_converter(arrow_type: pyarrow.DataType) -> Callable[[Any], Any]:
    """Return a function that parses the JSON strings in a value of this type."""
    if isinstance(arrow_type, pyarrow.BaseExtensionType) and arrow_type.extension_name == JSON_EXTENSION:
        return lambda value: None if value is None else json.loads(value)
    if isinstance(arrow_type, pyarrow.StructType):
        converters = {field.name: make_converter(field.type) for field in arrow_type}
        converters = {name: convert for name, convert in converters.items() if convert is not identity}
        return partial(convert_struct, converters) if converters else identity
    if isinstance(arrow_type, pyarrow.ListType | pyarrow.LargeListType | pyarrow.FixedSizeListType):
        convert = make_converter(arrow_type.value_type)
        if convert is identity:
            return identity
        return lambda value: None if value is None else [convert(item) for item in value]
    return identity


def identity(value: Any) -> Any:
    return value


def convert_struct(converters: dict[str, Callable[[Any], Any]], value: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if value is None else value | {name: convert(value[name]) for name, convert in converters.items()}


def first_line(error: BaseException) -> str:
    """Return the first line of an error message."""
    return (str(error).splitlines() or [type(error).__name__])[0]
