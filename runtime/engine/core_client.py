"""How a front end reaches an engine core: in the same process, or in its own over local sockets.

Importing this module and using `ProcessClient` loads no torch.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
import zmq.asyncio

from treadle.ir import errors
from treadle.ir.errors import EngineDeadError, UserError
from treadle.runtime.config import EngineConfig
from treadle.runtime.engine.core_process import CoreStart
from treadle.runtime.engine.model_info import ModelInfo
from treadle.runtime.protocol import (
    AbortRequests,
    CoreInput,
    CoreMessage,
    CoreOutput,
    CoreOutputs,
    CoreRequest,
    EngineDied,
    EngineReady,
    Shutdown,
    UtilityCall,
    UtilityResult,
)
from treadle.runtime.start_phases import phase_ended

if TYPE_CHECKING:
    from treadle.runtime.engine.core import EngineCore

logger = logging.getLogger(__name__)

MAX_SOCKET_PATH = 100
"""A local socket's path has 107 bytes at most."""

EXIT_GRACE_SECONDS = 5.0

_CHILD = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from treadle.runtime.engine.core_process import main; main()"


class InprocClient:
    """Calls a core in this process."""

    def __init__(self, config: EngineConfig):
        from treadle.runtime.executor.threads import wait_passively

        wait_passively()
        from treadle.runtime.engine.core import EngineCore

        phase_ended("import torch and the engine")
        self.core: EngineCore = EngineCore(config)
        self.info: ModelInfo = self.core.info

    def add_request(self, request: CoreRequest) -> None:
        """Queues a request."""
        self.core.add_request(request)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests."""
        self.core.abort(request_ids)

    def step(self) -> list[CoreOutput]:
        """Runs one step and returns its outputs. Raises EngineDeadError."""
        return self.core.step().outputs

    def call(self, method: str, *args: Any) -> Any:
        """Calls a utility of the core."""
        return self.core.call(method, args)

    def shutdown(self) -> None:
        """Ends the core."""
        self.core.shutdown()


class ProcessClient:
    """Starts a core process and talks to it from an event loop. Reports its death once, whatever the cause.

    `on_outputs` is awaited for each message of outputs; `on_death` is called with the reason.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_outputs: Callable[[list[CoreOutput]], Any],
        on_death: Callable[[str], None],
    ):
        self._config = config
        self._on_outputs = on_outputs
        self._on_death = on_death
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._num_calls = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(CoreMessage)
        self._process: subprocess.Popen[bytes] | None = None
        self._ready: asyncio.Future[ModelInfo] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._exited = asyncio.Event()
        self._closing = False
        self.dead_reason: str | None = None
        self._folder = ""

    @property
    def pid(self) -> int | None:
        """Process id of the core, once started."""
        return self._process.pid if self._process else None

    async def start(self) -> ModelInfo:
        """Starts the process and waits until it is ready. Raises UserError or EngineDeadError with its reason."""
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._launch()
        return await asyncio.shield(self._ready)

    def _launch(self) -> None:
        self._folder = _private_folder()
        start = CoreStart(config=_plain(self._config), folder=self._folder, log_level=logging.getLogger().level)
        self._to_core = zmq.Context.instance().socket(zmq.PUSH)
        self._from_core = zmq.asyncio.Context.instance().socket(zmq.PULL)
        for socket in (self._to_core, self._from_core):
            socket.setsockopt(zmq.LINGER, 0)
            socket.set_hwm(0)
        self._to_core.bind(start.input_address)
        self._from_core.bind(start.output_address)
        self._process = _spawn(start, self._config)
        loop = asyncio.get_running_loop()
        self._reader = loop.create_task(self._read())
        threading.Thread(target=self._watch, args=(self._process, loop), daemon=True, name="core-watch").start()

    def _watch(self, process: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop) -> None:
        """Runs in a thread: waits for the process to end and tells the loop."""
        status = process.wait()
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._core_exited, status)

    def _core_exited(self, status: int) -> None:
        # What it sent last (its own reason, final outputs) may still be on the way: give the reader a moment.
        asyncio.get_running_loop().call_later(0.2, self._settle_exit, status)

    def _settle_exit(self, status: int) -> None:
        self._exited.set()
        cause = f"signal {-status}" if status < 0 else f"status {status}"
        self._die(f"the engine core process ended with {cause}")

    async def _read(self) -> None:
        while True:
            message = self._decoder.decode(await self._from_core.recv())
            if isinstance(message, CoreOutputs):
                await self._on_outputs(message.outputs)
            elif isinstance(message, UtilityResult):
                self._finish_call(message)
            elif isinstance(message, EngineReady):
                self._become_ready(ModelInfo.from_dict(message.info))
            elif isinstance(message, EngineDied):
                self._die(message.reason, message.user_error)

    def _become_ready(self, info: ModelInfo) -> None:
        assert self._ready is not None
        if not self._ready.done():
            self._ready.set_result(info)

    def _finish_call(self, result: UtilityResult) -> None:
        future = self._calls.pop(result.call_id, None)
        if future is None or future.done():
            return
        if result.error is None:
            future.set_result(result.value)
        else:
            future.set_exception(UserError(result.error))

    def _die(self, reason: str, user_error: str | None = None) -> None:
        if self.dead_reason is not None:
            return
        self.dead_reason = reason
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(_start_error(reason, user_error))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(reason))
        self._calls.clear()
        if not self._closing:
            self._on_death(reason)

    def send(self, message: CoreInput) -> None:
        """Sends one message; never blocks, as the queue has no limit. Raises EngineDeadError once the core is dead."""
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)
        self._to_core.send(self._encoder.encode(message), zmq.NOBLOCK)

    def add_request(self, request: CoreRequest) -> None:
        """Queues a request."""
        self.send(request)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests."""
        self.send(AbortRequests(list(request_ids)))

    async def call(self, method: str, *args: Any) -> Any:
        """Calls a utility of the core; the result is plain data. Raises UserError or EngineDeadError."""
        self._num_calls += 1
        call = UtilityCall(self._num_calls, method, list(args))
        future = self._calls[call.call_id] = asyncio.get_running_loop().create_future()
        self.send(call)
        return await future

    async def shutdown(self, drain: float = 0.0) -> None:
        """Gives running requests `drain` seconds, then ends the process; kills it if it does not end by itself."""
        if self._process is None:
            return
        self._closing = True
        if self._ready is None or not self._ready.done():
            self._process.kill()  # it is still loading and reads no messages
        elif self.dead_reason is None:
            self.send(Shutdown(drain))
        try:
            await asyncio.wait_for(self._exited.wait(), drain + EXIT_GRACE_SECONDS)
        except TimeoutError:
            logger.warning("the engine core did not end within %.0f s and is killed", drain + EXIT_GRACE_SECONDS)
            self._process.kill()
            await self._exited.wait()
        self.close()

    def close(self) -> None:
        """Ends the process at once and removes the sockets. May be called twice, and without a loop."""
        self._closing = True
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.kill()
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._reader is not None and not self._reader.get_loop().is_closed():
            self._reader.cancel()
        self._to_core.close()
        self._from_core.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _start_error(reason: str, user_error: str | None) -> Exception:
    """What stopped the start, as the class it had in the core's process."""
    kind = getattr(errors, user_error, None) if user_error else None
    if isinstance(kind, type) and issubclass(kind, UserError):
        return kind(reason)
    return EngineDeadError(f"the engine core did not start: {reason}")


def _private_folder() -> str:
    """A new folder that only this user can enter, with a path short enough for sockets."""
    for parent in (None, "/tmp"):
        folder = tempfile.mkdtemp(prefix="treadle-", dir=parent)  # mode 0700
        if len(folder) <= MAX_SOCKET_PATH:
            return folder
        os.rmdir(folder)
    raise UserError("no short temporary folder for the engine's sockets; set TMPDIR to a short path")


def _plain(config: EngineConfig) -> dict[str, Any]:
    from treadle.runtime.executor.names import executor_name

    return {**dataclasses.asdict(config), "executor": executor_name(config.executor)}


def _spawn(start: CoreStart, config: EngineConfig) -> subprocess.Popen[bytes]:
    from treadle.runtime.executor.threads import default_num_threads, thread_environment

    threads = config.num_threads or default_num_threads()
    process = subprocess.Popen(
        [sys.executable, "-c", _CHILD, json.dumps(sys.path)],
        stdin=subprocess.PIPE,
        env={**os.environ, **thread_environment(threads)},
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(start) + b"\n")
    process.stdin.flush()
    return process
