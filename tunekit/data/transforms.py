"""What is done to a row's columns before it is understood: a list of choices, each of which takes and gives columns."""

from dataclasses import dataclass
from typing import Any, ClassVar

from tunekit.errors import FieldError, UserError

Fields = dict[str, Any]


@dataclass(frozen=True)
class RowTransform:
    """A step that a row goes through. Own ones derive from it and come by `--import`; they must not change `fields`."""

    def __call__(self, fields: Fields) -> Fields | None:
        """The columns that follow; None leaves the row out."""
        raise NotImplementedError


@dataclass(frozen=True)
class RenameColumns(RowTransform):
    """Columns under other names: `columns: {question: prompt, answer: completion}`. One that has the name gives way."""

    kind: ClassVar[str] = "rename_columns"
    column_mapping: dict[str, str]

    def __post_init__(self) -> None:
        if len(set(self.column_mapping.values())) < len(self.column_mapping):
            raise FieldError("column_mapping", "two columns get the same name")

    def __call__(self, fields: Fields) -> Fields | None:
        if missing := [name for name in self.column_mapping if name not in fields]:
            have = ", ".join(map(str, fields)) or "none"
            raise UserError(f"the row has no column {missing[0]!r} to rename (it has: {have})")
        named = {new: fields[old] for old, new in self.column_mapping.items()}
        return {
            name: value for name, value in fields.items() if name not in self.column_mapping and name not in named
        } | named


@dataclass(frozen=True)
class Filter(RowTransform):
    """Rows whose columns have these values: `columns: {language: [en, fr], checked: true}`. A list: one of them."""

    kind: ClassVar[str] = "filter"
    columns: dict[str, str | int | float | bool | tuple[str | int | float | bool, ...]]

    def __call__(self, fields: Fields) -> Fields | None:
        if missing := [name for name in self.columns if name not in fields]:
            have = ", ".join(map(str, fields)) or "none"
            raise UserError(f"the row has no column {missing[0]!r} to choose by (it has: {have})")
        wanted = (
            (fields[name], values if isinstance(values, tuple) else (values,)) for name, values in self.columns.items()
        )
        return fields if all(any(same(value, want) for want in values) for value, values in wanted) else None


def same(value: Any, want: str | int | float | bool) -> bool:
    """Whether a value is the one that is written: 1 and 1.0 are one number, `true` is none."""
    return value == want and isinstance(value, bool) == isinstance(want, bool)
