"""Exceptions with one-line messages for users."""


class UserError(Exception):
    """A mistake that the user can fix. The message states the problem and the fix. The CLI exits with code 2."""


class FieldError(ValueError):
    """An invalid value, raised in `__post_init__` of a config class. The config loader adds the file and line."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field, self.message = field, message


class RunStopped(Exception):
    """A run that was stopped by a signal and has saved its state. The CLI prints the message and exits with `code`."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code
