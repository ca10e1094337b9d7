"""Transforms of the columns of a row, before its format is read."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tunekit.errors import FieldError, UserError

Fields = dict[str, Any]


class RowFields(Fields):
    """Columns of a row, which record the names that a transform or a format reads. Copies and tests of names do not."""

    def __init__(self, fields: Fields, reads: set[str] | None = None) -> None:
        super().__init__(fields)
        self.reads: set[str] = set() if reads is None else reads

    def __getitem__(self, name: str, /) -> Any:
        self.reads.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None, /) -> Any:
        self.reads.add(name)
        return super().get(name, default)


def replace_column(fields: Mapping[str, Any], name: str, value: Any) -> RowFields:
    """Columns with another value of one of them. Reading the result counts as reading `fields`."""
    return RowFields({**fields, name: value}, fields.reads if isinstance(fields, RowFields) else None)


@dataclass(frozen=True)
class RowTransform:
    """Base class of transforms, also of user transforms given by `--import`. They must not modify `fields`."""

    def __call__(self, fields: Fields) -> Fields | None:
        """Return the new columns, or None to remove the row."""
        raise NotImplementedError


@dataclass(frozen=True)
class RenameColumns(RowTransform):
    """Rename columns: `column_mapping: {question: prompt, answer: completion}`. An existing column is replaced."""

    kind: ClassVar[str] = "rename_columns"
    column_mapping: dict[str, str]  # Old name to new name

    def __post_init__(self) -> None:
        if len(set(self.column_mapping.values())) < len(self.column_mapping):
            raise FieldError("column_mapping", "must not map two columns to the same name")

    def __call__(self, fields: Fields) -> Fields | None:
        require_columns(fields, self.column_mapping, "column_mapping")
        renamed = {new: fields[old] for old, new in self.column_mapping.items()}
        replaced = self.column_mapping.keys() | renamed.keys()
        return {name: value for name, value in fields.items() if name not in replaced} | renamed


@dataclass(frozen=True)
class Filter(RowTransform):
    """Keep rows whose columns have these values: `columns: {language: [en, fr], checked: true}`."""

    kind: ClassVar[str] = "filter"
    # Values that a row must have to be kept, by column; a list: one of them
    columns: dict[str, str | int | float | bool | tuple[str | int | float | bool, ...]]

    def __call__(self, fields: Fields) -> Fields | None:
        require_columns(fields, self.columns, "filter")
        allowed = (
            (fields[name], values if isinstance(values, tuple) else (values,)) for name, values in self.columns.items()
        )
        return fields if all(any(is_equal(value, item) for item in values) for value, values in allowed) else None


@dataclass(frozen=True)
class RemoveColumns(RowTransform):
    """Remove columns that are not meant to be used: `columns: [notes]`. Rows may lack them."""

    kind: ClassVar[str] = "remove_columns"
    columns: tuple[str, ...]  # Names of the columns

    def __call__(self, fields: Fields) -> Fields | None:
        return {name: value for name, value in fields.items() if name not in self.columns}


def require_columns(fields: Fields, names: Iterable[str], key: str) -> None:
    """Raise UserError, which starts with `key`, if the row lacks one of some columns."""
    if missing := [name for name in names if name not in fields]:
        columns = ", ".join(map(str, fields)) or "none"
        raise UserError(f"{key}: the row has no column {missing[0]!r} (columns: {columns})")


def is_equal(value: Any, expected: str | int | float | bool) -> bool:
    """Whether a value equals the expected one: 1 equals 1.0, but not true."""
    return value == expected and isinstance(value, bool) == isinstance(expected, bool)
