"""Errors of requests, with the JSON and status codes of OpenAI."""

from typing import Any


class APIError(Exception):
    """An error response. `param` is the field of the request that is wrong."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(param: str, problem: str) -> APIError:
    """Status 400 for a field."""
    return APIError(400, f"{param}: {problem}", param, "invalid_value")
