"""What the client itself adds: its latencies against a null server, beside those of the simplest client there can be."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Sequence
from typing import Any

import uvloop

from treadle.server.bench.client import Client
from treadle.server.bench.load import Address, ServeLoad, requests
from treadle.server.bench.measures import measure_requests
from treadle.server.bench.null_server import null_server
from treadle.server.bench.summary import percentile

TOKENS, INTERVAL, ROUNDS = 32, 0.02, 3
_END = b"0\r\n\r\n"


def measure_overhead(concurrency: int, load: ServeLoad) -> dict[str, Any]:
    """Both clients in turn, `concurrency` streams of 32 tokens at once; medians in milliseconds and what ours adds."""
    simple: list[float] = []
    ours: list[float] = []
    delay: list[float] = []
    with null_server(TOKENS, INTERVAL) as port:
        address = Address("127.0.0.1", port)
        bodies = requests(load, address, "null", concurrency, None)
        for _ in range(ROUNDS):
            simple += simplest_client(port, bodies)
            found = uvloop.run(_ours(address, bodies))
            ours.append(found["e2e_ms"]["median"])
            delay.append(found["send_delay_ms"]["median"])
    plain = percentile(sorted(simple), 50) * 1e3
    client = percentile(sorted(ours), 50)
    return {
        "concurrency": concurrency,
        "stream": {"tokens": TOKENS, "interval_ms": INTERVAL * 1e3, "rounds": ROUNDS},
        "simplest_client_e2e_ms": round(plain, 3),
        "client_e2e_ms": round(client, 3),
        "added_share": round(client / plain - 1, 5),
        "client_send_delay_ms": round(percentile(sorted(delay), 50), 3),
    }


async def _ours(address: Address, bodies: Sequence[bytes]) -> dict[str, Any]:
    client = Client(address, timeout=60)
    await client.connect(len(bodies))
    try:
        return measure_requests(await client.closed_loop(bodies, len(bodies)), {})
    finally:
        client.close()


def simplest_client(port: int, bodies: Sequence[bytes]) -> list[float]:
    """Seconds of each stream: sockets that are read until the last chunk, whose contents nobody looks at."""
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in bodies]
    seconds = []
    with selectors.DefaultSelector() as selector:
        for each, body in zip(sockets, bodies, strict=True):
            selector.register(each, selectors.EVENT_READ, time.perf_counter())
            each.sendall(body)
        while selector.get_map():
            for key, _ in selector.select():
                data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                if not data or data.endswith(_END):
                    seconds.append(time.perf_counter() - key.data)
                    selector.unregister(key.fileobj)
    for each in sockets:
        each.close()
    return seconds
