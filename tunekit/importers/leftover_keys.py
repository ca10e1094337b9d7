"""Keys that an importer has no rule for, from the table that also answers unknown keys in errors."""

from collections.abc import Collection
from typing import Any

from tunekit.config.migration_hints import KeyHint, find_hint
from tunekit.importers.draft import Draft
from tunekit.importers.foreign_keys import ForeignKeys

UNKNOWN = "unknown key: not in the tables of this importer"


def report_rest(keys: ForeignKeys, draft: Draft, own_keys: Collection[str]) -> None:
    """Map or report all keys that were not read. `own_keys` are the dotted keys of the recipe."""
    for dotted, value in keys.rest():
        name = dotted.rpartition(".")[2]
        row = find_hint(tuple(dotted.split(".")), own_keys)
        if value is None or value in ("", [], {}):
            draft.report_unneeded(dotted, value, "has no value")
        elif row is not None:
            report_hint(draft, dotted, value, row)
        elif dotted in own_keys and draft.get(dotted) is None:
            draft.set(dotted, value)
        elif name in own_keys and draft.get(name) is not None:
            draft.drop(dotted, value, f"{name} is set already")
        elif places := sorted((key for key in own_keys if key.endswith(f".{name}")), key=len):
            draft.drop(dotted, value, f"is a key of a section here: {places[0]}")
        else:
            draft.drop(dotted, value, UNKNOWN)


def report_hint(draft: Draft, dotted: str, value: Any, row: KeyHint) -> None:
    """Map a key that is only renamed, and report what the table says of any other one."""
    if not row.key:
        (draft.drop if row.is_needed and value is not False else draft.report_unneeded)(dotted, value, row.note)
    elif value is False:
        draft.report_unneeded(dotted, value, "off, as here by default")
    elif not row.note and draft.get(row.key) is None:
        draft.set(row.key, value)
    else:
        note = f"use {row.key}: {row.note}" if row.note else f"{row.key} is set already"
        draft.drop(dotted, value, note)
