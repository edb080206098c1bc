"""Errors of requests, in the form that clients get. Knows nothing of engines."""

from __future__ import annotations

import json
from typing import Any

from fastapi.responses import JSONResponse

__all__ = ["ApiError", "ClientLeft", "Plain", "error_body", "invalid", "invalid_form"]


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Build an error in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class ApiError(Exception):
    """An error that is answered in OpenAI's form."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @property
    def kind(self) -> str:
        """OpenAI's name for this kind of error."""
        kinds = {408: "timeout", 429: "rate_limit", 503: "service_unavailable", 504: "timeout"}
        return f"{kinds.get(self.status, 'invalid_request' if self.status < 500 else 'server')}_error"

    def body(self) -> dict[str, Any]:
        return error_body(str(self), self.kind, self.param, self.code)

    def response(self) -> JSONResponse:
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return Plain(self.body(), self.status, headers)


def invalid(name: str, problem: str, code: str = "invalid_value") -> ApiError:
    """Build the error of a request whose field ``name`` has a ``problem``."""
    return ApiError(400, f"{name}: {problem}", name, code)


def invalid_form(name: str, message: str) -> ApiError:
    """Build the error of a request whose form, which its field ``name`` holds, cannot be used or followed. ``message``
    is the engine's, which calls any form structured."""
    return invalid(name, message.removeprefix("structured "))


class ClientLeft(Exception):
    """The client has closed its connection and no longer waits for the answer."""


class Plain(JSONResponse):
    """JSON in ASCII: an error may quote half a surrogate pair, which UTF-8 cannot encode."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode()
