"""A server that computes nothing: answers any POST with a paced stream of tokens. Its latency is the pace's alone.

`python -m treadle.server.bench.null_server TOKENS INTERVAL_SECONDS` prints its port, and ends with its stdin.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httptools

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def _chunk(content: bytes) -> bytes:
    event = b"data: " + content + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(event), event)


TOKEN = _chunk(b'{"id":"cmpl-0","object":"text_completion","created":0,"model":"null","choices":[{"index":0,"text":" token","finish_reason":null}]}')


class NullStream(asyncio.Protocol):
    """One connection: after each request `tokens` events, `interval` seconds apart, the first after one interval."""

    def __init__(self, tokens: int, interval: float):
        self._tokens, self._interval = tokens, interval
        usage = b'{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":%d,"total_tokens":%d}}' % (tokens, tokens + 1)
        self._tail = _chunk(usage) + _chunk(b"[DONE]") + b"0\r\n\r\n"
        self._parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._transport.write(HEAD)
        self._start = asyncio.get_running_loop().time()
        self._later(1)

    def _later(self, number: int) -> None:
        asyncio.get_running_loop().call_at(self._start + number * self._interval, self._send, number)

    def _send(self, number: int) -> None:
        if self._transport.is_closing():
            return
        if number < self._tokens:
            self._transport.write(TOKEN)
            self._later(number + 1)
        else:
            self._transport.write(TOKEN + self._tail)


@contextmanager
def null_server(tokens: int, interval: float) -> Iterator[int]:
    """Runs one in a process of its own; gives its port."""
    command = [sys.executable, "-m", __name__, str(tokens), str(interval)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdin is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait(timeout=10)
        process.stdout.close()


async def _serve(tokens: int, interval: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: NullStream(tokens, interval), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    import uvloop

    uvloop.run(_serve(int(sys.argv[1]), float(sys.argv[2])))
