"""Errors as OpenAI's clients know them: one JSON shape, a status, and the parameter that caused them."""

from __future__ import annotations

import re
from typing import Any

from treadle.ir.errors import EngineDeadError, UserError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    499: "client_closed_request",
    503: "service_unavailable_error",
}
_FIELD = re.compile(r"SamplingParams\.(\w+)")


class ApiError(Exception):
    """An answer with an error status. `param` names the field at fault, `code` is for programs to act on."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The JSON body, in OpenAI's shape."""
        kind = _TYPES.get(self.status, "api_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None, code: str | None = None) -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, message, param=param, code=code)


def as_api_error(error: BaseException, param: str | None = None) -> ApiError:
    """Returns the answer for an error of ours: 400 for a user's, 503 for a dead engine, 500 for the rest.

    A 500 says nothing of its cause to the caller; the cause is in the log.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDeadError):
        return ApiError(503, f"the engine has died: {error}", code="engine_dead")
    if isinstance(error, UserError):
        field = _FIELD.search(str(error))
        named = field[1] if field else getattr(error, "param", None) or param
        return bad_request(str(error).replace("SamplingParams.", ""), named)
    return ApiError(500, "an internal error ended this request; the server's log has the cause", code="internal_error")
