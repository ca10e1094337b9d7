"""Errors of the Hugging Face Hub: retries transient ones, and turns the others into one-line messages.

The client retries most requests of an upload, but not the first ones and not the commit.
"""

import json
import math
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TypeVar
from urllib.request import getproxies

from huggingface_hub import constants, get_session, get_token, set_client_factory
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # of the HTTP library that this version of the client uses # pyright: ignore[reportPrivateImportUsage]
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import disable_progress_bars
from tqdm import tqdm

from tunekit.errors import UserError
from tunekit.hub.foreign_hints import drop_hints

T = TypeVar("T")
# Errors of the client, which raises RuntimeError for large files and ValueError for invalid arguments.
CLIENT_ERRORS = (HTTPError, ValueError, RuntimeError, OSError)
MAX_ATTEMPTS = 6
MAX_DELAY = 300  # seconds; the command fails if the Hub asks for a longer delay
TIMEOUT_VARIABLE = "TUNEKIT_HUB_TIMEOUT"  # timeout of a request, in seconds without data
DEFAULT_TIMEOUT = 120.0
RESOLVED_HOSTS: set[str] = set()
REPEAT_HINT = "Repeat the command later; complete files are kept"


def retry_call(fn: Callable[[], T], name: str, progress: Callable[[], int] = lambda: 0) -> T:
    """Call `fn`, again after a delay if it fails with a transient error; each delay is printed.

    Gives up after MAX_ATTEMPTS calls in a row that did not increase `progress`.
    """
    configure_client()
    attempt, done = 1, progress()
    while True:
        try:
            return fn()
        except CLIENT_ERRORS as error:
            attempt, done = (1 if progress() > done else attempt), progress()
            cause = root_cause(error)
            delay = retry_delay(cause, attempt)
            if attempt == MAX_ATTEMPTS or not is_transient(cause) or delay > MAX_DELAY:
                raise
            reason = f"{constants.ENDPOINT}: {describe_failure(cause)}"
            print_line(f"{name}: {reason}; trying again in {delay:.0f} s ({attempt} of {MAX_ATTEMPTS - 1})")
            time.sleep(delay)
            attempt += 1


class HubUnreachableError(OfflineModeIsEnabled):
    """The host name of the Hub cannot be resolved. The client and `datasets` then use their caches without retries."""


@cache
def configure_client() -> None:
    """Set a timeout for requests, because the client has none, and fail at once without a network.

    Disables progress bars without a terminal.
    """
    if not sys.stderr.isatty():
        disable_progress_bars()
    timeout = request_timeout()
    client = get_session()
    client_class, hooks = type(client), client.event_hooks
    if client.timeout.read is None:  # otherwise the user has set one
        hooks = {**hooks, "request": [*hooks.get("request", []), lambda request: require_network(request.url.host)]}
        set_client_factory(lambda: client_class(event_hooks=hooks, follow_redirects=True, timeout=timeout))


def require_network(host: str) -> None:
    """Raise HubUnreachableError if a host name cannot be resolved. The client would try that again for half a minute.

    A host that was resolved once is not checked again, nor with a proxy, which resolves names itself.
    """
    if host in RESOLVED_HOSTS or not {"http", "https", "all"}.isdisjoint(getproxies()):
        return
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise HubUnreachableError(f"cannot resolve {host}: {error.strerror}") from None
    RESOLVED_HOSTS.add(host)


def request_timeout() -> float:
    """Timeout of a request in seconds, from the environment."""
    value = os.environ.get(TIMEOUT_VARIABLE, str(DEFAULT_TIMEOUT))
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise UserError(f"{TIMEOUT_VARIABLE}: must be a number of seconds > 0, got {value!r}")
    return seconds


def is_transient(error: BaseException) -> bool:
    """Whether a retry may succeed: after rate limiting, a server error, a lost connection, or an incomplete file."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    is_lost = isinstance(error, (HTTPError, json.JSONDecodeError))  # proxies return an HTML page on errors
    return is_lost or is_incomplete_file(error)


def is_incomplete_file(error: BaseException) -> bool:
    """Whether a file has another size than the Hub says. The client has no class for it, but deletes the file."""
    return type(error) is OSError and error.errno is None and "Consistency check failed" in str(error)


def describe_failure(error: BaseException) -> str:
    """Describe a transient failure, for the line about a retry."""
    if isinstance(error, HfHubHTTPError):
        return f"answered {error.response.status_code}"
    return "sent an incomplete file" if is_incomplete_file(error) else "lost the connection"


def retry_delay(error: BaseException, attempt: int) -> float:
    """Delay before a retry in seconds: as requested by the Hub, else 1, 2, 4, ..."""
    headers = error.response.headers if isinstance(error, HfHubHTTPError) else {}
    match = re.fullmatch(r"\s*(\d+)\s*", headers.get("Retry-After", ""))
    match = match or re.search(r"\br=0;\s*t=(\d+)", headers.get("RateLimit", ""))  # no requests left for t seconds
    return float(match[1]) if match else 2.0 ** (attempt - 1)


@contextmanager
def wrap_hub_errors(name: str, revision: str | None = None, token: str | None = None) -> Iterator[None]:
    """Turn errors of the client into a one-line UserError without a cause. Redacts the token.

    A token with invalid characters is rejected first, because the HTTP library would print it in its error.
    """
    if token is not None and not re.fullmatch("[!-~]+", token):
        raise UserError("the Hub access token contains invalid characters. Copy it again.")
    try:
        yield
    except CLIENT_ERRORS as error:
        line = " ".join(explain_error(root_cause(error), name, revision).split())
        raise UserError(line.replace(token or get_token() or "\n", "***")) from None


def root_cause(error: BaseException) -> BaseException:
    """Error without the exceptions that the client wraps around it."""
    is_wrapper = isinstance(error, RuntimeError) or (
        isinstance(error, LocalEntryNotFoundError)
        and isinstance(error.__cause__, (HfHubHTTPError, OfflineModeIsEnabled))
        and not isinstance(error.__cause__, HubUnreachableError)
    )
    return root_cause(error.__cause__) if is_wrapper and error.__cause__ else error


def explain_error(error: BaseException, name: str, revision: str | None) -> str:
    """Error message with a fix. The first class that matches is the most specific."""
    hub = constants.ENDPOINT
    lines = {
        HFValidationError: f"'{name}' is neither a directory nor a valid name on the Hub (owner/model)",
        GatedRepoError: f"{name}: gated model. Accept its terms at {hub}/{name}, then use `hf auth login` or HF_TOKEN.",
        RevisionNotFoundError: f"{name}: no revision '{revision or 'main'}'. See {hub}/{name}/tree/main.",
        RepositoryNotFoundError: f"{name}: no accessible model at {hub}. Check the name; a private or gated model "
        "requires `hf auth login` or HF_TOKEN.",
        HubUnreachableError: f"{name}: {hub} cannot be reached: its host name cannot be resolved",
        OfflineModeIsEnabled: f"{name}: HF_HUB_OFFLINE disables access to {hub}",
        LocalEntryNotFoundError: f"{name}: no local directory, not complete in the cache, and {hub} cannot be reached",
    }
    if line := next((line for kind, line in lines.items() if isinstance(error, kind)), None):
        return line
    if isinstance(error, HfHubHTTPError):
        return explain_status(error, name)
    if isinstance(error, HTTPError):
        return f"{name}: lost the connection to {hub}. {REPEAT_HINT}."
    return f"{name}: " + (
        f"{hub} sent an incomplete file. {REPEAT_HINT}." if is_incomplete_file(error) else drop_hints(error)
    )


def explain_status(error: HfHubHTTPError, name: str) -> str:
    """Error message for an HTTP status."""
    hub, code = constants.ENDPOINT, error.response.status_code
    hints = {
        401: "Not logged in, or invalid token. Run `hf auth login`, or set HF_TOKEN",
        403: "Use a token with write access",
        412: f"Another commit was pushed meanwhile. Check {hub}/{name}/commits, then repeat the upload",
    }
    message = (error.server_message or "no reason given").partition("\n")[0][:300]
    hint = hints.get(code, REPEAT_HINT if is_transient(error) else f"See {hub}/{name}")
    return f"{name}: {hub} answered {code}: {message}. {hint}."


def print_line(line: str) -> None:
    """Print a line to standard error, above a progress bar."""
    tqdm.write(line, file=sys.stderr)
