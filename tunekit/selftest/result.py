"""The result of a check, and how a check reports that it failed or cannot run. Imports nothing heavy."""

from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["passed", "failed", "skipped"]


class CheckFailedError(Exception):
    """The check ran, and its result is wrong. The message is the line that is printed."""


class CheckSkippedError(Exception):
    """The check cannot run on this device. The message is the reason."""


@dataclass(frozen=True)
class Result:
    """The result of a check that passed: a line of text, and values for the JSON file."""

    detail: str
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """A check after it ran, whatever happened to it."""

    check: str
    status: Status
    seconds: float
    detail: str
    values: dict[str, Any] = field(default_factory=dict)
