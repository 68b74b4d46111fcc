"""Sends prepared requests to one server: at their moments, or so many at a time. Times what comes back."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Sequence

from treadle.server.bench.http_stream import StreamConnection, Timed
from treadle.server.bench.load import Address


class Client:
    """Keeps connections and uses them again. `most_open` is the most requests that were under way at once."""

    def __init__(self, address: Address, timeout: float):
        self._address = address
        self._timeout = timeout
        self._idle: deque[StreamConnection] = deque()
        self._tls = ssl.create_default_context() if address.tls else None
        self._open = 0
        self.most_open = 0

    async def open_loop(self, requests: Sequence[bytes], moments: Sequence[float]) -> list[Timed]:
        """Each request at its moment, whatever became of those before. Latency counts from the moment, not the sending."""
        start = time.perf_counter()
        tasks = []
        for request, moment in zip(requests, moments, strict=True):
            if (early := start + moment - time.perf_counter()) > 0:
                await asyncio.sleep(early)
            tasks.append(asyncio.create_task(self._send(request, start + moment)))
        return list(await asyncio.gather(*tasks))

    async def closed_loop(self, requests: Sequence[bytes], concurrency: int) -> list[Timed]:
        """`concurrency` at a time: the next is due the moment that one has ended."""
        waiting, found = iter(requests), []

        async def work() -> None:
            due = time.perf_counter()
            for request in waiting:
                timed = await self._send(request, due)
                found.append(timed)
                due = timed.ended

        await asyncio.gather(*(work() for _ in range(min(concurrency, len(requests)))))
        return found

    async def connect(self, count: int) -> None:
        """Opens connections ahead, so that their handshakes are no part of a latency. Raises OSError."""
        self._idle.extend(await asyncio.gather(*(self._connection() for _ in range(count))))

    def close(self) -> None:
        """Closes all connections."""
        while self._idle:
            self._idle.pop().close()

    async def _send(self, request: bytes, due: float) -> Timed:
        timed = Timed(due)
        self._open += 1
        self.most_open = max(self.most_open, self._open)
        try:
            connection = await self._take()
            await connection.run(request, timed, self._timeout)
            if connection.is_open:
                self._idle.append(connection)
        except OSError as error:
            timed.error, timed.ended = f"cannot connect: {error}", time.perf_counter()
        finally:
            self._open -= 1
        return timed

    async def _take(self) -> StreamConnection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return await self._connection()

    async def _connection(self) -> StreamConnection:
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(StreamConnection, self._address.host, self._address.port, ssl=self._tls)
        return made
