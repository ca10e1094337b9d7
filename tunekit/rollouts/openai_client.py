"""Requests to a server with the OpenAI protocol."""

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

from tunekit.config.secrets import hide_secrets
from tunekit.errors import UserError
from tunekit.rollouts.http_request import Limits, OpenConnections, Response, ResponseTooLargeError, send_request

TRANSIENT = (408, 409, 425, 429, 500, 502, 503, 504, 529)  # HTTP statuses after which a request is repeated
NOT_FOUND = 404
FIRST_DELAY, MAX_DELAY = 0.5, 30.0  # seconds between two attempts
MAX_ERROR_LENGTH = 300  # characters of an error response
MAX_RESPONSE_BYTES = 2**26


class ResponseError(Exception):
    """A response that does not follow the protocol. The message states the problem."""


@dataclass(frozen=True)
class OpenAIClient:
    """Sends requests to paths below `base_url`. `where` is the config key that errors name.

    As a context manager, it ends requests of other threads at the end of the block.
    """

    where: str
    base_url: str
    api_key_env: str  # environment variable, which may be unset
    timeout_seconds: float  # of a response, from the connection to its last byte
    max_retries: int
    max_response_bytes: int = MAX_RESPONSE_BYTES
    connections: OpenConnections = field(default_factory=OpenConnections, compare=False)

    def __enter__(self) -> "OpenAIClient":
        return self

    def __exit__(self, *error: object) -> None:
        self.connections.close()

    def request(
        self, path: str, body: Mapping[str, Any] | None = None, on_missing: Callable[[], None] | None = None
    ) -> Any:
        """Response to a POST request, or to a GET request without a body. Repeated after errors that may be temporary.

        `on_missing` is called after status 404, before the request is repeated. Raises UserError after the last error.
        """
        problem = ""
        for attempt in range(self.max_retries + 1):
            try:
                response = self.send(path, body)
                if response.status < 300:
                    return parse_body(response)
                problem = f"HTTP status {response.status}: {error_message(response)}"
                if response.status == NOT_FOUND and on_missing is not None:
                    on_missing()
                    continue
                if response.status not in TRANSIENT:
                    break
            except (ResponseError, ResponseTooLargeError) as error:
                problem = str(error)
                break
            except (OSError, HTTPException) as error:
                problem = self.describe(error)
            if attempt < self.max_retries and self.connections.closed.wait(min(FIRST_DELAY * 2**attempt, MAX_DELAY)):
                break
        raise self.error(f"/{path}: {problem}")

    def send(self, path: str, body: Mapping[str, Any] | None) -> Response:
        """Response to one request. Raises OSError, HTTPException or ResponseTooLargeError."""
        limits = Limits(time.monotonic() + self.timeout_seconds, self.max_response_bytes)
        url = f"{self.base_url.rstrip('/')}/{path}"
        data = None if body is None else json.dumps(body).encode()
        return send_request(urllib.request.Request(url, data, self.headers()), limits, self.connections)

    def headers(self) -> dict[str, str]:
        key = os.environ.get(self.api_key_env, "").strip()
        if not (key.isascii() and key.isprintable()):
            fix = f"Set ${self.api_key_env} to the key alone."
            raise UserError(f"{self.where}: ${self.api_key_env} has characters that no API key has. {fix}")
        return {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}

    def describe(self, error: OSError | HTTPException) -> str:
        """Reason of a failed request."""
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, TimeoutError):
            return f"timed out after {self.timeout_seconds:g} s (timeout_seconds)"
        return str(reason) or type(reason).__name__

    def error(self, problem: str) -> UserError:
        """Error of the server, with the keys to check."""
        advice = f"Check base_url, model and ${self.api_key_env}, and that the server runs."
        return UserError(f"{self.where}: {hide_secrets(self.base_url)}: {problem}. {advice}")


def parse_body(response: Response) -> Any:
    """JSON of a response, or its text. Raises ResponseError."""
    if response.headers.get("Content-Type", "").startswith("text/"):
        return response.body.decode(errors="replace")
    try:
        return json.loads(response.body)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ResponseError(f"the response is not JSON ({reason})") from None


def error_message(response: Response) -> str:
    """Text of an error response in one line."""
    if 300 <= response.status < 400:
        location = response.headers.get("Location", "another address")
        return f"redirects are not followed, set base_url to the address that {shorten_text(location)} belongs to"
    text = response.body.decode(errors="replace")
    try:
        body = json.loads(text)
        text = str(body.get("error", body)["message"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    return shorten_text(text).rstrip(".")


def shorten_text(text: str) -> str:
    """A text of a server in one line of limited length."""
    return " ".join(text[: 10 * MAX_ERROR_LENGTH].split())[:MAX_ERROR_LENGTH]
