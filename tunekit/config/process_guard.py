"""State of this process that code of the user must leave as it is: streams, imports, directory, signal handlers."""

import fcntl
import io
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import TextIO

from tunekit.errors import UserError, is_ctrl_c

STREAMS = {1: "stdout", 2: "stderr"}  # name in `sys` by file descriptor
PACKAGES = ("torch", "tunekit")  # whose modules are imported during a run, too
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
MIN_DESCRIPTOR = 100  # of copies: code that closes a range of descriptors starts at 0


class ChangedProcessError(UserError):
    """Code of the user has changed the state of the process, which has been restored."""


class ProcessGuard:
    """Context manager around code of the user that restores the state of the process after it.

    Raises ChangedProcessError, which starts with `where()`, for changes that would break what follows, unless it is
    empty. Handlers of signals are restored without an error: some packages set them when they are imported.
    """

    def __init__(self, where: Callable[[], str]) -> None:
        self.where = where

    def __enter__(self) -> "ProcessGuard":
        self.copies = {number: copy for number in STREAMS if (copy := copy_descriptor(number)) is not None}
        self.streams: dict[str, TextIO] = {name: vars(sys)[name] for name in STREAMS.values()}
        self.path, self.modules = list(sys.path), dict(sys.modules)
        self.directory = current_directory()
        self.handlers = {number: signal.getsignal(number) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        changes = [*self.restore_streams(), *self.restore_imports(), *self.restore_directory()]
        self.restore_handlers()
        if changes and (where := self.where()) and (error is None or not is_ctrl_c(error)):
            raise ChangedProcessError(f"{where}: {', '.join(changes)}. Remove the code that does this.") from error

    def restore_streams(self) -> list[str]:
        changes = []
        for number, copy in self.copies.items():
            if not is_open(number):
                os.dup2(copy, number)
                changes.append(f"closes file descriptor {number}")
            os.close(copy)
        for number, name in STREAMS.items():
            stream = vars(sys)[name]
            if stream is None or (isinstance(stream, io.TextIOBase) and stream.closed):
                saved = self.streams[name]
                is_usable = saved is not None and not saved.closed
                setattr(sys, name, saved if is_usable else open(number, "w", closefd=False))  # noqa: SIM115, PTH123
                changes.append(f"closes sys.{name}")
        return changes

    def restore_imports(self) -> list[str]:
        changes = []
        if missing := [entry for entry in self.path if entry not in sys.path]:
            sys.path += missing
            changes.append("removes entries of sys.path")
        if removed := {name: module for name, module in self.modules.items() if is_removed(name, module)}:
            sys.modules.update(removed)
            changes.append(f"removes {min(removed)} from sys.modules")
        return changes

    def restore_directory(self) -> list[str]:
        if self.directory is None or current_directory() == self.directory:
            return []
        with suppress(OSError):  # it was deleted
            os.chdir(self.directory)
            return ["changes the working directory"]
        return []

    def restore_handlers(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in self.handlers.items():
                if handler is not None and signal.getsignal(number) is not handler:
                    signal.signal(number, handler)


def copy_descriptor(number: int) -> int | None:
    """A copy of a file descriptor; None if it is not open, or there are too many."""
    with suppress(OSError):
        return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, MIN_DESCRIPTOR)
    return None


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def is_removed(name: str, module: ModuleType | None) -> bool:
    """Whether an imported module is None now, or missing if it belongs to a package that is still imported from."""
    if module is None or sys.modules.get(name, module) is None:
        return module is not None
    return name not in sys.modules and name.partition(".")[0] in PACKAGES


def current_directory() -> str | None:
    """The working directory; None if it was deleted."""
    try:
        return os.getcwd()  # noqa: PTH109
    except OSError:
        return None
