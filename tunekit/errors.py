"""What a person did wrong, told in one line."""


class UserError(Exception):
    """A mistake that the person at the keyboard can mend: the message says what and how. The CLI exits with code 2."""


class FieldError(ValueError):
    """A value that a choice refuses, raised in its `__post_init__`. The config names the file and line of the field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field, self.message = field, message


class RunStopped(Exception):
    """The run was asked to stop and has saved. The CLI prints the message and exits with `code`, as a shell expects."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code
