"""Which keys of another trainer an importer reads without an effect, a report or an error."""

from collections.abc import Callable, Iterable
from typing import Any

from tunekit.errors import UserError
from tunekit.importers.imported import VALUE_ERRORS, Imported

WORDS = ("text", "epoch", "1,2", "keep_end", "sequential", "bfloat16", "json", "truncate",
         "fp4", "hqq", "interleave_over", "api")  # fmt: skip
VALUES: tuple[Any, ...] = (True, 7, 0.25, ["a", "b"], {"a": 1}, False, *WORDS)
ImportValues = Callable[[dict[str, Any]], Imported]


def fingerprint(result: Imported) -> tuple[str, set[tuple[str, str]]]:
    return result.text, {(finding.effect, finding.key) for finding in result.draft.findings}


def silent_keys(import_values: ImportValues, base: dict[str, Any], names: Iterable[str]) -> list[str]:
    """Keys without any effect for all of some values."""
    before = fingerprint(import_values(base))
    return [name for name in names if not any(has_effect(import_values, base, name, value, before) for value in VALUES)]


def has_effect(import_values: ImportValues, base: dict[str, Any], name: str, value: Any, before: Any) -> bool:
    try:
        return fingerprint(import_values({**base, name: value})) != before
    except (UserError, *VALUE_ERRORS):
        return True


def unknown_keys(import_values: ImportValues, base: dict[str, Any], names: Iterable[str]) -> list[str]:
    """Keys that are reported as unknown."""
    unknown = []
    for name in names:
        for value in VALUES:
            try:
                findings = import_values({**base, name: value}).draft.findings
            except (UserError, *VALUE_ERRORS):
                continue
            if any(finding.key == name and finding.note.startswith("unknown key") for finding in findings):
                unknown.append(name)
                break
    return unknown
