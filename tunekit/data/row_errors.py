"""Messages about rows that fail, with the other kind whose columns they have, or the line of user code."""

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunekit.config.choices import kind_name
from tunekit.data.chat_template.messages import MissingColumnError
from tunekit.data.format_detection import explain_missing_column
from tunekit.errors import UserError, describe_exception

# Exceptions of user transforms and formats that make a row a bad row.
USER_CODE_ERRORS = (
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    AssertionError,
    RuntimeError,
    OSError,
    SystemExit,
)


def format_row_error(error: BaseException, fields: Mapping[str, Any], config: object, *transforms: object) -> str:
    """Message about a row for which a dataset config or a transform raised. Raises errors that are not of user code."""
    if isinstance(error, MissingColumnError):
        return explain_missing_column(error, fields, kind_name(type(config)))
    message = str(error) if isinstance(error, UserError) else format_user_code_error(error, config, *transforms)
    if message is None:
        raise error
    return message


def format_user_code_error(error: BaseException, *configs: object) -> str | None:
    """Exception with the line of user code that raised it; None if no class of `configs` is from that code."""
    modules = {cls.__module__ for config in configs for cls in type(config).__mro__}
    user_modules = {name for name in modules if name != "builtins" and not name.startswith("tunekit.")}
    frames = traceback.walk_tb(error.__traceback__)
    positions = [(frame.f_code, line) for frame, line in frames if frame.f_globals["__name__"] in user_modules]
    if not positions:
        return None
    code, line = positions[-1]
    return f"{Path(code.co_filename).name}:{line}: {describe_exception(error)}"
