"""Collection of config errors, so that all of them are reported together."""

from collections.abc import Sequence
from typing import Any

from tunekit.errors import FieldError, UserError

Path = tuple[str, ...]  # the keys from the top of the config down to a value


class FieldErrors(FieldError):
    """Errors of several fields, raised by `__post_init__` of a config dataclass. All of them are reported."""

    def __init__(self, errors: Sequence[FieldError]) -> None:
        super().__init__(errors[0].field, errors[0].message)
        self.errors = tuple(errors)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.errors,)


class ConfigError(UserError):
    """All errors of a config, one line each: file and line, key, message."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = tuple(lines)

    def __reduce__(self) -> tuple[Any, ...]:  # worker processes and other ranks pickle exceptions
        return type(self), (self.lines,)


class ErrorCollector:
    """Collects errors. `at` is the location, such as `c.yaml:12` or `command line`; empty parts are omitted."""

    def __init__(self) -> None:
        self.lines: dict[str, None] = {}  # ordered and unique: an alias repeats the error of its anchor

    def add(self, at: str, path: Path, message: str) -> None:
        parts = (at, ".".join(path), " ".join(message.split()))
        self.lines[" ".join(": ".join(part for part in parts if part).splitlines())] = None

    def check(self) -> None:
        """Raise ConfigError if there are errors."""
        if self.lines:
            raise ConfigError(tuple(self.lines))
