"""Runs the tool calls of an answer. Whatever goes wrong becomes text that the model reads."""

import inspect
import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from tunekit.errors import CaughtError, describe_exception

Tools = Mapping[str, Callable[..., Any]]


class ToolResult(NamedTuple):
    """Text that the model reads after a call."""

    content: str
    is_error: bool = False


def run_tool(tools: Tools, call: Mapping[str, Any], timeout_seconds: float) -> ToolResult:
    """Result of a call in OpenAI's format. Wrong names and arguments, exceptions and timeouts are results too."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    if name not in tools:
        return error_result(f"Tool {name} not found. Available tools: {', '.join(tools) or 'none'}")
    if (problem := find_wrong_arguments(tools[name], arguments)) is not None:
        return error_result(f"{name}: {problem}")
    future = run_in_thread(lambda: to_text(tools[name](**arguments)))
    try:
        error = future.exception(timeout_seconds)
    except TimeoutError:
        return error_result(f"{name}: no result after {timeout_seconds:g} seconds")
    if error is not None:
        return error_result(describe_exception(error))
    return ToolResult(future.result())


def run_in_thread(call: Callable[[], Any]) -> Future[Any]:
    """Future of a call in a thread that does not keep the process alive if the call hangs."""
    future: Future[Any] = Future()

    def run() -> None:
        with CaughtError() as caught:
            future.set_result(call())
        if caught.error is not None:
            future.set_exception(caught.error)

    threading.Thread(target=run, daemon=True, name="tunekit-tool").start()
    return future


def error_result(problem: str) -> ToolResult:
    """An error as TRL writes it."""
    return ToolResult(to_text({"error": problem}), True)


def find_wrong_arguments(tool: Callable[..., Any], arguments: Mapping[str, Any]) -> str | None:
    """Why a tool cannot be called with some arguments; None if it can. Only names are checked."""
    try:
        signature = inspect.signature(tool)
    except ValueError:  # some functions of C have none
        return None
    try:
        signature.bind(**arguments)
    except TypeError as error:
        return str(error)
    return None


def to_text(value: Any) -> str:
    """Result of a tool as text: lists, objects and None as JSON."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)
