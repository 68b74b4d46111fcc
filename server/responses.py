"""Answers that take time: given up when the client goes away, cut when it stops reading, errors sent as events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from treadle.server.errors import as_api_error

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
CLIENT_GONE = 499


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


class JsonResponse(Response):
    """Strict JSON: a NaN or an infinity that slipped through becomes null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


def error_response(error: BaseException) -> JsonResponse:
    """Returns the answer for an error; one that is our fault is logged with its cause."""
    known = as_api_error(error)
    if known.code == "internal_error":
        logger.error("a request failed", exc_info=error)
    return JsonResponse(known.body(), known.status, headers=known.headers)


def event(content: Any) -> bytes:
    """Returns one server-sent event."""
    return b"data: " + orjson.dumps(content) + b"\n\n"


async def unless_client_gone(receive: Receive, work: Awaitable[Any]) -> Any:
    """Returns what `work` returns; cancels it and raises ClientGone when the client closes the connection."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for future in (task, watch):
            future.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def answer(request: Request, work: Awaitable[Any], on_gone: Callable[[], None]) -> Response:
    """Returns `work`'s result as JSON, or nothing much if the client did not wait for it."""
    try:
        return JsonResponse(await unless_client_gone(request.receive, work))
    except ClientGone:
        on_gone()
        return Response(status_code=CLIENT_GONE)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, after the last of them `ending`. The status is decided by the first event, so a request that is
    refused at once is a plain error.

    `on_close` runs once at the end, `on_gone` before it if the client went away or stopped reading.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        ending: bytes = DONE,
        stall_timeout: float,
        on_close: Callable[[], None],
        on_gone: Callable[[], None],
    ):
        super().__init__(media_type="text/event-stream; charset=utf-8")
        self._events = events
        self._ending = ending
        self._stall_timeout = stall_timeout
        self._on_close = on_close
        self._on_gone = on_gone
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_client_gone(receive, self._send_all(scope, receive, send))
        except ClientGone:
            self._on_gone()
        finally:
            self._on_close()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events) as events:
                async for chunk in events:
                    await self._send(send, chunk)
        except ClientGone:
            raise
        except Exception as error:
            known = as_api_error(error)
            if known.code == "internal_error":
                logger.error("a stream failed", exc_info=error)
            if not self._started:
                await error_response(known)(scope, receive, send)
                return
            await self._send(send, event(known.body()))
        await self._send(send, self._ending, last=True)

    async def _send(self, send: Send, chunk: bytes, *, last: bool = False) -> None:
        """Sends one chunk; a client that leaves it unread for too long counts as gone."""
        if not self._started:
            self._started = True
            headers = [*self.raw_headers_without_length(), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async with asyncio.timeout(self._stall_timeout):
                await send({"type": "http.response.body", "body": chunk, "more_body": not last})
        except TimeoutError as error:
            raise ClientGone from error

    def raw_headers_without_length(self) -> list[tuple[bytes, bytes]]:
        """The headers of a body whose length is not known."""
        return [(name, value) for name, value in self.raw_headers if name != b"content-length"]
