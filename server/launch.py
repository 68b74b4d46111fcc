"""Runs the HTTP server over an engine: listens, drains on SIGTERM, ends when the engine dies. Returns an exit code."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from types import FrameType
from typing import Any

import uvicorn

from treadle.ir.errors import ConfigError
from treadle.server.api import create_app
from treadle.server.config import ServerConfig
from treadle.server.state import ServerState

logger = logging.getLogger(__name__)

EXIT_OK, EXIT_ENGINE_DEAD, EXIT_FORCED = 0, 1, 2

_POLL_SECONDS = 0.2
_CUT_SECONDS = 2
"""What a stream that was aborted at the end of the drain has to send its last event."""


def listen(config: ServerConfig) -> socket.socket:
    """Returns a bound socket. Raises ConfigError naming the address if it cannot be had."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"cannot listen on host {config.host!r}: {error.strerror}; choose another --host") from error
    try:
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error.strerror}; choose another --port or --host") from error
    listener.set_inheritable(False)
    return listener


async def run_server(engine: Any, config: ServerConfig, listener: socket.socket) -> int:
    """Serves until told to stop and returns the process's exit code: 0 after a drain, 1 after the engine's death, 2 if forced.

    On the first SIGTERM or SIGINT new requests get a 503 and running ones `drain_timeout` seconds; a second
    signal ends at once and cuts them.
    """
    app = create_app(engine, config)
    settings = uvicorn.Config(
        app,
        http="httptools",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=_CUT_SECONDS,
    )
    server = _Server(settings, app.state.server)
    host, port = listener.getsockname()[:2]
    listener.listen(settings.backlog)  # whoever reads the next line may connect at once
    logger.info("serving %s on http://%s:%d", ", ".join(app.state.server.model_names), host, port)
    supervisor = asyncio.create_task(server.supervise())
    try:
        await server.serve(sockets=[listener])
    finally:
        supervisor.cancel()
        await asyncio.gather(supervisor, return_exceptions=True)
        await engine.shutdown(drain_timeout=0.0)
    return server.exit_code


class _Server(uvicorn.Server):
    """A uvicorn server whose first signal starts a drain in place of closing the listener."""

    def __init__(self, settings: uvicorn.Config, state: ServerState):
        super().__init__(settings)
        self.exit_code = EXIT_OK
        self._state = state
        self._num_signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn for SIGTERM and SIGINT, between two steps of the loop."""
        self._num_signals += 1
        if self._num_signals > 1:
            self.should_exit = self.force_exit = True
            self.exit_code = EXIT_FORCED

    async def supervise(self) -> None:
        """Waits for a signal or the engine's death and ends the server accordingly."""
        while not self._num_signals and self._state.engine.is_alive:
            await asyncio.sleep(_POLL_SECONDS)
        if self._num_signals:
            await self._drain()
        if not self._state.engine.is_alive:
            await self._report_death()
        self.should_exit = True

    async def _drain(self) -> None:
        state = self._state
        logger.info("draining: %d requests in flight", state.admission.num_inflight)
        if not await state.admission.drained(state.config.drain_timeout):
            logger.warning("%d requests did not end in time and are cut", state.admission.num_inflight)
            await state.abort_running()
            await state.admission.drained(_CUT_SECONDS)

    async def _report_death(self) -> None:
        self.exit_code = EXIT_ENGINE_DEAD
        logger.error("the engine has died: %s; exiting", self._state.engine.dead_reason)
        await asyncio.sleep(self._state.config.dead_grace)


async def start_engine(engine: Any) -> bool:
    """Waits until the engine is ready; returns False if a signal asked to stop before. Raises its start errors."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for sig in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sig, stop.set)
    ready, stopped = asyncio.ensure_future(engine.wait_ready()), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({ready, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            await engine.shutdown(drain_timeout=0.0)
            return False
        ready.result()
        return True
    finally:
        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(sig)
        for future in (ready, stopped):
            future.cancel()
        await asyncio.gather(ready, stopped, return_exceptions=True)
