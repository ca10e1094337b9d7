"""Errors of a row: with its file and line, or with the line of a user's own transform."""

import traceback
from pathlib import Path

from tunekit.data.readers.row_reader import Row
from tunekit.errors import UserError


def blame(error: Exception, *choices: object) -> str | None:
    """What went wrong in which line of a person's own file; None, if it went wrong elsewhere."""
    modules = {cls.__module__ for choice in choices for cls in type(choice).__mro__}
    own = {name for name in modules if name != "builtins" and not name.startswith("tunekit.")}
    trace = traceback.walk_tb(error.__traceback__)
    places = [(frame.f_code, line) for frame, line in trace if frame.f_globals["__name__"] in own]
    if not places:
        return None
    code, line = places[-1]
    said = " ".join(traceback.format_exception_only(error)[-1].split())
    return f"{Path(code.co_filename).name}:{line}: {said}"


def with_row_location(row: Row, function, *arguments):
    """Call a function; what it finds wrong is told with the row's file and line."""
    try:
        return function(*arguments)
    except UserError as error:
        raise UserError(f"{row.where}: {error}") from None
