"""Mistakes are collected, so that a person sees all of them at once."""

from collections.abc import Sequence

from tunekit.errors import FieldError, UserError

Path = tuple[str, ...]  # the keys from the top of the config down to a value


class FieldErrors(FieldError):
    """Several values that a choice refuses, raised in its `__post_init__` so that all of them are told."""

    def __init__(self, errors: Sequence[FieldError]) -> None:
        super().__init__(errors[0].field, errors[0].message)
        self.errors = tuple(errors)


class ConfigError(UserError):
    """All mistakes of a config, one line each: where it is written, which key, what is wrong."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = tuple(lines)


class ErrorCollector:
    """The mistakes found so far. `at` is a place such as `c.yaml:12` or `command line`; empty parts are left out."""

    def __init__(self) -> None:
        self.lines: dict[str, None] = {}  # in order, and once each: an alias brings the same mistake in twice

    def add(self, at: str, path: Path, message: str) -> None:
        parts = (at, ".".join(path), " ".join(message.split()))
        self.lines[" ".join(": ".join(part for part in parts if part).splitlines())] = None

    def check(self) -> None:
        """Raise if anything is wrong."""
        if self.lines:
            raise ConfigError(tuple(self.lines))
