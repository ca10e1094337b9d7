"""What can go wrong between here and the Hub: what passes by itself is tried again, the rest is told in one line.

The client itself repeats most requests of an upload, and tells so; neither the first ones nor the commit.
"""

import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

from huggingface_hub import constants, get_session, get_token, set_client_factory
from huggingface_hub.errors import (
    HfHubHTTPError,
    HTTPError,  # of the HTTP library that this version of the client uses # pyright: ignore[reportPrivateImportUsage]
    LocalEntryNotFoundError,
)
from huggingface_hub.utils import disable_progress_bars
from tqdm import tqdm

from tunekit.errors import UserError

T = TypeVar("T")
# What the client raises: it wraps what happens to large files in RuntimeErrors, and refuses with ValueErrors.
TROUBLE = (HTTPError, ValueError, RuntimeError, OSError)
TRIES = 6
PATIENCE = 300  # seconds: if the Hub asks to wait longer, the command ends and says so
SILENCE = "TUNEKIT_HUB_TIMEOUT"  # seconds without a byte after which a request has failed
USUAL = 120.0


def retry(
    act: Callable[[], T],
    what: str,
    kinds: tuple[type[Exception], ...] = TROUBLE,
    progress: Callable[[], int] = lambda: 0,
) -> T:
    """Call `act`, again after a delay if it fails with a transient error; each delay is printed.

    Gives up after `TRIES` calls in a row that did not increase `progress`.
    """
    prepare()
    attempt, done = 1, progress()
    while True:
        try:
            return act()
        except kinds as error:
            attempt, done = (1 if progress() > done else attempt), progress()
            cause = source(error)
            wait = seconds(cause, attempt)
            if attempt == TRIES or not is_transient(cause) or wait > PATIENCE:
                raise
            print_line(f"{what}: {short_reason(cause)}; trying again in {wait:.0f} s ({attempt} of {TRIES - 1})")
            time.sleep(wait)
            attempt += 1


@cache
def prepare() -> None:
    """Let the client give up a server that says nothing: by itself it waits for ever. Bars are for terminals."""
    if not sys.stderr.isatty():
        disable_progress_bars()
    seconds = silence()
    client = get_session()
    kind, hooks = type(client), client.event_hooks
    if client.timeout.read is None:  # else somebody has chosen it
        set_client_factory(lambda: kind(event_hooks=hooks, follow_redirects=True, timeout=seconds))


def silence() -> float:
    """The longest that a Hub may say nothing, in seconds."""
    word = os.environ.get(SILENCE, str(USUAL))
    try:
        seconds = float(word)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise UserError(f"{SILENCE}: {word!r} is no number of seconds above 0")
    return seconds


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed later: too many requests, a Hub in trouble, a connection that broke."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    return isinstance(error, (HTTPError, json.JSONDecodeError))  # a proxy in trouble answers with a page


def seconds(error: BaseException, attempt: int) -> float:
    """How long to wait: what the Hub asks for, else 1, 2, 4, ..."""
    headers = error.response.headers if isinstance(error, HfHubHTTPError) else {}
    asked = re.fullmatch(r"\s*(\d+)\s*", headers.get("Retry-After", ""))
    asked = asked or re.search(r"\br=0;\s*t=(\d+)", headers.get("RateLimit", ""))  # nothing remains for t seconds
    return float(asked[1]) if asked else 2.0 ** (attempt - 1)


def short_reason(error: BaseException) -> str:
    """What went wrong, in a few words."""
    if isinstance(error, HfHubHTTPError):
        return f"{constants.ENDPOINT} answered {error.response.status_code}"
    return f"lost the connection to {constants.ENDPOINT}"


@contextmanager
def wrap_hub_errors(explanation: Callable[[BaseException], str], token: str | None = None) -> Iterator[None]:
    """Turn what the client raises into one line. The cause is cut off, and a token hidden: the Hub may have quoted it.

    A token with characters that none has would be shown by the HTTP library when it refuses to send it.
    """
    if token is not None and not re.fullmatch("[!-~]+", token):
        raise UserError("the token holds characters that no token has: copy it again")
    try:
        yield
    except TROUBLE as error:
        line = " ".join(explanation(source(error)).split())
        raise UserError(line.replace(token or get_token() or "\n", "***")) from None


def source(error: BaseException) -> BaseException:
    """What went wrong, without what the client wraps around it. Whether it looked for local files is left as it is."""
    wraps = isinstance(error, RuntimeError) or (
        isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, HfHubHTTPError)
    )
    return source(error.__cause__) if wraps and error.__cause__ else error


def server_message(error: HfHubHTTPError) -> str:
    """What the Hub says about its refusal, in one line of bearable length."""
    return (error.server_message or "it does not say why").partition("\n")[0][:300]


def print_line(line: str) -> None:
    """A line for people; what scripts use goes to standard output."""
    tqdm.write(line, file=sys.stderr)  # above a bar if there is one
