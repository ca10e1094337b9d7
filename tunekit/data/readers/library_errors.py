"""Errors of libraries that read data. They raise exceptions of many types for malformed files and addresses."""

from collections.abc import Callable
from types import TracebackType

from tunekit.errors import UserError


class LibraryErrors:
    """Context manager that turns any exception except UserError into a UserError with the text of `describe`.

    Only for opening and reading data: a bug of other code would be reported as an error of the file.
    """

    def __init__(self, describe: Callable[[Exception], str]) -> None:
        self.describe = describe

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, Exception) and not isinstance(error, UserError):
            raise UserError(self.describe(error)) from None
