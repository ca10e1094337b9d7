"""Exceptions with one-line messages for users, and the location of exceptions in user code."""

import difflib
import math
import operator
import re
import signal
import threading
import traceback
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, NamedTuple, NoReturn

USER_MODULES = ("own_", "tunekit_import_")  # prefixes of the modules of recipe files and of `--import`
SESSION_FILES: set[str] = set()  # files, or cells of a notebook, of functions that a Python session has passed
DOUBLE_STOP = re.compile(r"(?<=[^\s./])\.\.(?=\s|$)")  # of a quoted message and of the sentence that contains it


class UserError(Exception):
    """A mistake that the user can fix. The message states the problem and the fix. The CLI exits with code 2."""

    def __init__(self, message: str) -> None:
        super().__init__(DOUBLE_STOP.sub(".", message))

    def _render_traceback_(self) -> list[str]:
        """Lines that IPython shows instead of a traceback."""
        return [f"{type(self).__name__}: {self}"]


class FieldError(ValueError):
    """An invalid value, raised in `__post_init__` of a config class. The config loader adds the file and line."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field, self.message = field, message

    def __reduce__(self) -> tuple[Any, ...]:  # worker processes and other ranks pickle exceptions
        return type(self), (self.field, self.message)


def closest_match(word: str, words: Iterable[str]) -> str | None:
    """Most similar of `words`, ignoring case."""
    by_lower_case = {other.lower(): other for other in words}
    matches = difflib.get_close_matches(word.lower(), by_lower_case, 1)
    return by_lower_case[matches[0]] if matches else None


def did_you_mean(word: str, words: Iterable[str], otherwise: str = "") -> str:
    """` Did you mean 'x'?` with the most similar of `words`, to follow a sentence; without one, ` {otherwise}`."""
    match = closest_match(word, words)
    hint = f"Did you mean '{match}'?" if match else otherwise
    return f" {hint}" if hint else ""


def check_range(
    config: object,
    *names: str,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
) -> None:
    """Raise FieldError for the first field of a config class that is set and is out of range or infinite."""
    checks = ((">=", ge, operator.ge), (">", gt, operator.gt), ("<=", le, operator.le), ("<", lt, operator.lt))
    limits = [(sign, bound, compare) for sign, bound, compare in checks if bound is not None]
    for name in names:
        value = getattr(config, name)
        if value is not None and not (
            abs(value) < math.inf and all(compare(value, bound) for _, bound, compare in limits)
        ):
            expected = " and ".join(f"{sign} {bound}" for sign, bound, _ in limits)
            finite = " and finite" if value == math.inf and le is lt is None else ""
            raise FieldError(name, f"must be {expected}{finite}, got {value}")


class DeferredError:
    """Runs functions until the first UserError, and raises it later, when no other rank waits in a collective."""

    def __init__(self) -> None:
        self.error: UserError | None = None

    def __call__(self, fn: Callable[[], object]) -> None:
        if self.error is None:
            try:
                fn()
            except UserError as error:
                self.error = error

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error


class RunStopped(Exception):
    """Ends a command early, such as a run that has saved its state after a signal.

    The CLI prints the message and exits with `code`.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.code)


class CtrlC(KeyboardInterrupt):
    """Raised by the handler of SIGINT of the CLI. Any other KeyboardInterrupt may come from code of the user."""


def raise_ctrl_c(number: int, frame: FrameType | None) -> NoReturn:
    """Handler of SIGINT."""
    raise CtrlC


def is_ctrl_c(error: BaseException) -> bool:
    """Whether the user has pressed Ctrl-C. With the handler of Python, any KeyboardInterrupt counts as such."""
    has_own_handler = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    return isinstance(error, CtrlC) or (isinstance(error, KeyboardInterrupt) and not has_own_handler)


class CaughtError:
    """Context manager that keeps any exception as `error` instead of raising it: code of the user may raise anything.

    Ctrl-C and what ends the command as intended are raised in the main thread. In others, they would only be printed.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> "CaughtError":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        is_main_thread = threading.current_thread() is threading.main_thread()
        if error is None or (is_main_thread and (isinstance(error, RunStopped) or is_ctrl_c(error))):
            return False
        self.error = error
        return True


class UserCodeLocation(NamedTuple):
    """An exception in a file of the user: `file:line: Exception: message`, and the traceback from that line on."""

    message: str
    stack: str


def find_user_code(error: BaseException) -> UserCodeLocation | None:
    """Innermost line of user code in the traceback of an exception; None if there is none."""
    frames = list(traceback.walk_tb(error.__traceback__))
    indices = [i for i, (frame, _) in enumerate(frames) if is_user_code(frame)]
    if not indices or isinstance(error, UserError | RunStopped) or is_ctrl_c(error):
        return None
    frame, line = frames[indices[-1]]
    message = describe_exception(error)
    stack = "".join(traceback.format_tb(error.__traceback__)[indices[-1] :])
    return UserCodeLocation(f"{frame.f_code.co_filename}:{line}: {message}", stack)


def is_user_code(frame: FrameType) -> bool:
    """Whether a line belongs to a file of the user, or to a function that a Python session has passed."""
    is_user_module = frame.f_globals.get("__name__", "").startswith(USER_MODULES)
    return is_user_module or frame.f_code.co_filename in SESSION_FILES


def describe_exception(error: BaseException) -> str:
    """`Exception: message` in one line, also if the exception cannot be converted to text."""
    lines = traceback.format_exception_only(error)  # before it, the code of a SyntaxError; after it, notes
    text = " ".join(next(line for line in lines if not line.startswith(" ")).split())
    return text.removeprefix(f"{type(error).__module__}.")


def describe_user_code_error(error: BaseException) -> str:
    """`file:line: Exception: message` with the innermost line of user code; without file and line if there is none."""
    location = find_user_code(error)
    return describe_exception(error) if location is None else location.message
