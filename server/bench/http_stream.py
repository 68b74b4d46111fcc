"""One connection that sends prepared requests and times what streams back. Plain HTTP/1.1 on asyncio; TLS where asked.

Chunks become minimal typed records, never trees: enough to tell which carry text, and to read the usage of the last.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import httptools
import msgspec

OK = 200
_ERROR_BYTES = 300


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass
class Timed:
    """One request as it went: moments on `time.perf_counter`. `arrivals` has one for each chunk that carried text."""

    scheduled: float
    sent: float = 0.0
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    status: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finished: bool = False
    error: str | None = None


class EventReader:
    """Splits a body into server-sent events, wherever it was cut on its way, and notes each in `timed`."""

    def __init__(self, timed: Timed):
        self._timed = timed
        self._rest = b""

    def feed(self, data: bytes, now: float) -> None:
        """Takes bytes that came at `now`."""
        lines = (self._rest + data).split(b"\n") if self._rest else data.split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._note(line[5:].strip(), now)

    def _note(self, content: bytes, now: float) -> None:
        timed = self._timed
        if content == b"[DONE]":
            timed.finished = True
            return
        try:
            chunk = _decode(content)
        except msgspec.MsgspecError as error:
            timed.error = f"an event is not what the API says: {error}"
            return
        if _is_given(chunk.error):
            timed.error = f"the server sent an error: {bytes(chunk.error)[:_ERROR_BYTES].decode(errors='replace')}"
        if chunk.usage is not None:
            timed.prompt_tokens, timed.completion_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
        if any(_carries_text(choice) for choice in chunk.choices):
            timed.arrivals.append(now)


def _is_given(value: msgspec.Raw) -> bool:
    return bytes(value) not in (b"", b"null", b"[]")


def _carries_text(choice: _Choice) -> bool:
    delta = choice.delta
    if delta is None:
        return bool(choice.text)
    return bool(delta.content or delta.reasoning_content or delta.reasoning or _is_given(delta.tool_calls))


class StreamConnection(asyncio.Protocol):
    """One request at a time. `run` returns when the answer is whole, the connection is lost, or time is up."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._timed = Timed(0.0)
        self._reader = EventReader(self._timed)
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0
        self._refusal = b""
        self._keeps_alive = True

    @property
    def is_open(self) -> bool:
        """Whether another request can be sent."""
        return self._transport is not None and not self._transport.is_closing() and self._keeps_alive

    async def run(self, request: bytes, timed: Timed, timeout: float) -> None:
        """Sends the bytes of a whole request and fills `timed`; failures are noted there, not raised."""
        assert self._transport is not None, "not connected"
        self._timed, self._reader, self._refusal = timed, EventReader(timed), b""
        self._parser = httptools.HttpResponseParser(self)
        loop = asyncio.get_running_loop()
        self._done = done = loop.create_future()
        timed.sent = time.perf_counter()
        self._transport.write(request)
        timer = loop.call_later(timeout, self._give_up, f"no whole answer within {timeout:g} s")
        try:
            await done
        finally:
            timer.cancel()
            self._done = None

    def close(self) -> None:
        """Closes the connection."""
        if self._transport is not None:
            self._transport.close()

    # asyncio.Protocol

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._give_up(f"the answer is not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._give_up(f"the server closed the connection{f': {exc}' if exc else ''}")

    # httptools

    def on_headers_complete(self) -> None:
        self._timed.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._timed.status == OK:
            self._reader.feed(body, self._now)
        elif len(self._refusal) < _ERROR_BYTES:
            self._refusal += body[:_ERROR_BYTES]

    def on_message_complete(self) -> None:
        timed = self._timed
        self._keeps_alive = self._parser.should_keep_alive()
        if timed.status != OK:
            timed.error = f"HTTP {timed.status}: {self._refusal.decode(errors='replace')}"
        elif not timed.finished and timed.error is None:
            timed.error = "the stream ended without [DONE]"
        self._finish()

    def _give_up(self, reason: str) -> None:
        if self._done is not None and not self._done.done():
            self._timed.error = self._timed.error or reason
            self._keeps_alive = False
            self.close()
            self._finish()

    def _finish(self) -> None:
        self._timed.ended = self._now = time.perf_counter()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)
