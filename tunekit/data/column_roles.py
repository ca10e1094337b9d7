"""Names of the columns of a dataset, by their role: `columns: {prompt: question}` in a config."""

from dataclasses import field
from typing import Any

from tunekit.config.choices import field_slots, kind_name
from tunekit.config.suggestions import closest_match
from tunekit.errors import FieldError

Columns = dict[str, str | None]  # name of a column by its role


def column_roles(**defaults: str | None) -> Any:
    """Field `columns` of a kind of dataset, with the column of each role if a config names no other."""
    return field(default_factory=lambda: dict(defaults), hash=False)


def complete_columns(cls: type, columns: Columns, nullable: frozenset[str]) -> Columns:
    """Columns of all roles of a kind. Raise FieldError for an unknown role, and for a column without a name."""
    defaults: Columns = field_slots(cls)["columns"].default
    for role, name in columns.items():
        if role not in defaults:
            raise FieldError(f"columns.{role}", unknown_role_message(role, defaults, kind_name(cls)))
        if not name and not (name is None and role in nullable):
            received = "null" if name is None else repr(name)
            raise FieldError(f"columns.{role}", f"must be the name of a column, got {received}")
    return defaults | columns


def unknown_role_message(role: str, defaults: Columns, kind: str) -> str:
    """Message about a role that a kind does not have, with those that it has and the most similar one."""
    if not defaults:
        return f"kind {kind} has no roles. Set the `kind` of the rows, whose roles name their columns"
    nearest = next((name for name, column in defaults.items() if column == role), None) or closest_match(role, defaults)
    suggestion = f", did you mean '{nearest}'?" if nearest else "."
    return f"unknown role{suggestion} Roles of kind {kind}: {', '.join(defaults)}"
