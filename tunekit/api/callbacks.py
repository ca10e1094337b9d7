"""Functions that receive the metrics of a run. They get copies and cannot change what the run computes."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any

import torch

from tunekit.api.session import isolated_torch
from tunekit.errors import SESSION_FILES, CaughtError, UserError, describe_exception, find_user_code
from tunekit.loggers.observers import OpenObserver

# Receives the metrics of a line of metrics.jsonl with `step`; its result is ignored
Callback = Callable[[dict[str, float]], object]


class CallbackObserver:
    """Calls a function with each metric line, between two steps."""

    def __init__(self, callback: Callback, where: str, device: torch.device) -> None:
        self.callback, self.where, self.device = callback, where, device

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Call the function. Raises UserError, with file and line, if it raises."""
        with CaughtError() as caught, isolated_torch(self.device):
            self.callback({"step": step, **values})
        if caught.error is not None:
            location = find_user_code(caught.error)
            message = describe_exception(caught.error) if location is None else location.message
            raise UserError(f"{self.where}: {message}. Fix the function.") from caught.error

    def close(self) -> None:
        pass


def open_callbacks(callbacks: Iterable[Callback], where: str, device: torch.device) -> list[OpenObserver]:
    """Observers that call the functions. Raises UserError for anything that is no function of one argument."""
    openers = []
    for index, callback in enumerate(callbacks):
        name = f"{where}: callbacks.{index}"
        check_callback(callback, name)
        observer = CallbackObserver(callback, name, device)
        openers.append(lambda start, num_steps, observer=observer: observer)
    return openers


def check_callback(callback: Any, where: str) -> None:
    if not callable(callback):
        raise UserError(f"{where}: expected a function, got {type(callback).__name__}. Pass fn(metrics).")
    if isinstance(callback, FunctionType):
        SESSION_FILES.add(callback.__code__.co_filename)
    try:
        inspect.signature(callback).bind({})
    except TypeError as error:
        raise UserError(f"{where}: is called with a dict of metrics: {error}. Pass fn(metrics).") from None
    except ValueError:  # without a signature, as some functions of C libraries
        return
