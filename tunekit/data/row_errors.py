"""Errors of user code on a row, with the line of the code."""

import traceback
from pathlib import Path

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


def format_user_code_error(error: BaseException, *configs: object) -> str | None:
    """Exception with the line of user code that raised it; None if no class of `configs` is from that code."""
    modules = {cls.__module__ for config in configs for cls in type(config).__mro__}
    user_modules = {name for name in modules if name != "builtins" and not name.startswith("tunekit.")}
    frames = traceback.walk_tb(error.__traceback__)
    positions = [(frame.f_code, line) for frame, line in frames if frame.f_globals["__name__"] in user_modules]
    if not positions:
        return None
    code, line = positions[-1]
    message = " ".join(traceback.format_exception_only(error)[-1].split())
    return f"{Path(code.co_filename).name}:{line}: {message}"
