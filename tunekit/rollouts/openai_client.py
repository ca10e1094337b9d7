"""Requests to a server with the OpenAI protocol."""

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from tunekit.config.secrets import hide_secrets
from tunekit.errors import UserError

TRANSIENT = (408, 409, 425, 429, 500, 502, 503, 504, 529)  # HTTP statuses after which a request is repeated
NOT_FOUND = 404
FIRST_DELAY, MAX_DELAY = 0.5, 30.0  # seconds between two attempts
MAX_ERROR_LENGTH = 300  # characters of an error response


@dataclass(frozen=True)
class OpenAIClient:
    """Sends requests to paths below `base_url`. `where` is the config key that errors name."""

    where: str
    base_url: str
    api_key_env: str  # environment variable, which may be unset
    timeout_seconds: float
    max_retries: int

    def request(
        self, path: str, body: Mapping[str, Any] | None = None, on_missing: Callable[[], None] | None = None
    ) -> Any:
        """Response to a POST request, or to a GET request without a body. Repeated after errors that may be temporary.

        `on_missing` is called after status 404, before the request is repeated. Raises UserError after the last error.
        """
        problem = ""
        for attempt in range(self.max_retries + 1):
            try:
                return self.send(path, body)
            except urllib.error.HTTPError as error:
                problem = f"HTTP status {error.code}: {error_message(error)}"
                if error.code == NOT_FOUND and on_missing is not None:
                    on_missing()
                    continue
                if error.code not in TRANSIENT:
                    break
            except (OSError, HTTPException) as error:
                reason = error.reason if isinstance(error, urllib.error.URLError) else error
                problem = str(reason) or type(error).__name__
            except ValueError as error:
                problem = f"the response is not JSON ({error})"
                break
            if attempt < self.max_retries:
                time.sleep(min(FIRST_DELAY * 2**attempt, MAX_DELAY))
        raise self.error(f"/{path}: {problem}")

    def send(self, path: str, body: Mapping[str, Any] | None) -> Any:
        """Response to one request: its JSON, or its text. Raises OSError, HTTPException or ValueError."""
        key = os.environ.get(self.api_key_env)
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        url = f"{self.base_url.rstrip('/')}/{path}"
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=self.timeout_seconds) as reply:
            is_json = not reply.headers.get("Content-Type", "").startswith("text/")
            return json.load(reply) if is_json else reply.read().decode(errors="replace")

    def error(self, problem: str) -> UserError:
        """Error of the server, with the keys to check."""
        advice = f"Check base_url, model and ${self.api_key_env}, and that the server runs."
        return UserError(f"{self.where}: {hide_secrets(self.base_url)}: {problem}. {advice}")


def error_message(error: urllib.error.HTTPError) -> str:
    """Text of an error response in one line."""
    try:
        text = error.read().decode(errors="replace")
    except (OSError, HTTPException):
        return error.reason
    try:
        body = json.loads(text)
        text = str(body.get("error", body)["message"])
    except (ValueError, LookupError, TypeError, AttributeError):
        pass
    return " ".join(text.split())[:MAX_ERROR_LENGTH].rstrip(".")
