"""Around every request: its id is echoed, its key is checked, its outcome is counted. Keys are never logged."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from treadle.server.errors import ApiError
from treadle.server.state import ServerState

OPEN_PATHS = {"/health", "/ready", "/metrics", "/version"}
"""What probes and scrapers reach without a key."""

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")


class Gatekeeper:
    """ASGI middleware. The id a client sends is only echoed; the engine's ids are always our own, so that two
    requests in flight with the same id do not meet."""

    def __init__(self, app: ASGIApp, state: ServerState):
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value for name, value in scope["headers"] if name in (b"authorization", b"x-request-id")}
        request_id = _request_id(headers.get(b"x-request-id", b""))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
                endpoint = getattr(scope.get("route"), "path", "other")
                self._state.metrics.requests.labels(endpoint, str(message["status"])).inc()
            await send(message)

        if self._is_refused(scope["path"], headers.get(b"authorization", b"")):
            await _unauthorized()(scope, receive, send_with_id)
        else:
            await self._app(scope, receive, send_with_id)

    def _is_refused(self, path: str, authorization: bytes) -> bool:
        if not self._state.needs_key or path in OPEN_PATHS:
            return False
        scheme, _, key = authorization.partition(b" ")
        return scheme.lower() != b"bearer" or not self._state.accepts(key.strip())


def _request_id(given: bytes) -> str:
    text = given.decode("latin-1")
    return text if _REQUEST_ID.fullmatch(text) else uuid.uuid4().hex


def _unauthorized() -> JSONResponse:
    message = "an API key is needed: send the header 'Authorization: Bearer KEY' with one of this server's keys"
    error = ApiError(401, message, code="invalid_api_key")
    return JSONResponse(error.body(), 401, headers={"WWW-Authenticate": "Bearer"})
