"""The engine core as a process of its own: a start message on stdin, then msgpack over two local sockets.

stdin stays open as long as the front end lives; its end means that the front end died, and ends this process.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import threading
import time
from typing import Any

import msgspec
import zmq

from treadle.codegen.bundle import is_bundle
from treadle.ir.config import resolve
from treadle.ir.errors import EngineDeadError, TreadleError, UserError
from treadle.runtime.config import EngineConfig
from treadle.runtime.executor.early_open import open_early
from treadle.runtime.protocol import (
    AbortRequests,
    CoreInput,
    CoreMessage,
    CoreOutputs,
    CoreRequest,
    EngineDied,
    EngineReady,
    Shutdown,
    UtilityCall,
    UtilityResult,
)
from treadle.runtime.start_phases import phase_ended

logger = logging.getLogger(__name__)

SIGTERM_DRAIN_SECONDS = 30.0
IDLE_POLL_MS = 200
LINGER_MS = 2000


class CoreStart(msgspec.Struct, kw_only=True):
    """The one message on stdin. `folder` is the private folder of the two sockets."""

    config: dict[str, Any]
    folder: str
    log_level: int = logging.WARNING

    @property
    def input_address(self) -> str:
        return f"ipc://{self.folder}/in"

    @property
    def output_address(self) -> str:
        return f"ipc://{self.folder}/out"


class CoreProcess:
    """Answers messages, and steps the core while there is work."""

    def __init__(self, start: CoreStart):
        context = zmq.Context.instance()
        self._inputs = context.socket(zmq.PULL)
        self._inputs.connect(start.input_address)
        self._outputs = context.socket(zmq.PUSH)
        self._outputs.setsockopt(zmq.LINGER, LINGER_MS)
        self._outputs.setsockopt(zmq.SNDHWM, 0)
        self._outputs.connect(start.output_address)
        self._decoder = msgspec.msgpack.Decoder(CoreInput)
        self._encoder = msgspec.msgpack.Encoder()
        self._deadline: float | None = None  # set once shutting down

    def send(self, message: CoreMessage) -> None:
        """Sends one message to the front end."""
        self._outputs.send(self._encoder.encode(message))

    def begin_shutdown(self, drain: float) -> None:
        """Takes no new request; running ones have `drain` seconds. The earliest deadline counts."""
        deadline = time.monotonic() + drain
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)

    def run(self, config: EngineConfig) -> int:
        """Builds the core and serves until a shutdown. Returns the process's exit status."""
        try:
            if is_bundle(config.bundle):
                open_early(config)
            from treadle.runtime.engine.core import EngineCore  # brings torch

            phase_ended("import torch and the engine")
            core = EngineCore(config)
        except Exception as error:
            self.send(_startup_failure(error))
            if not isinstance(error, TreadleError):
                logger.exception("the engine core did not start")
            return 1
        self.send(EngineReady(info=core.info.as_dict()))
        try:
            self._serve(core)
        except EngineDeadError as error:
            logger.exception("the engine core died")
            self.send(EngineDied(reason=str(error)))
            return 1
        finally:
            core.shutdown()
        return 0

    def _serve(self, core: Any) -> None:
        while not self._is_over(core):
            self._receive(core, wait=not core.has_work)
            if not core.has_work:
                core.check_health()
            else:
                outputs = core.step()
                if outputs.outputs:
                    self.send(outputs)
        if ended := core.abort_all():
            self.send(CoreOutputs(outputs=ended))

    def _is_over(self, core: Any) -> bool:
        if self._deadline is None:
            return False
        return not core.has_requests or time.monotonic() >= self._deadline

    def _receive(self, core: Any, wait: bool) -> None:
        if wait and not self._inputs.poll(IDLE_POLL_MS):
            return
        while True:
            try:
                frame = self._inputs.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(core, frame)

    def _handle(self, core: Any, frame: bytes) -> None:
        try:
            message = self._decoder.decode(frame)
        except msgspec.MsgspecError as error:
            self._refuse(core, frame, str(error))
            return
        if isinstance(message, CoreRequest):
            if self._deadline is None:
                core.add_request(message)
            else:
                core.reject(message.request_id, "the engine is shutting down")
        elif isinstance(message, AbortRequests):
            core.abort(message.request_ids)
        elif isinstance(message, UtilityCall):
            self.send(_call(core, message))
        elif isinstance(message, Shutdown):
            self.begin_shutdown(message.drain)

    def _refuse(self, core: Any, frame: bytes, error: str) -> None:
        """A request that does not decode ends with an error; it must not end the others."""
        try:
            raw = msgspec.msgpack.decode(frame)
        except msgspec.DecodeError:
            raw = None
        if isinstance(raw, dict) and isinstance(raw.get("request_id"), str):
            core.reject(raw["request_id"], f"the request is malformed: {error}")
        else:
            logger.error("dropped a message that does not decode: %s", error)


def _call(core: Any, message: UtilityCall) -> UtilityResult:
    try:
        return UtilityResult(call_id=message.call_id, value=msgspec.to_builtins(core.call(message.method, message.args)))
    except (UserError, TypeError, AssertionError) as error:
        return UtilityResult(call_id=message.call_id, error=f"{type(error).__name__}: {error}")


def _startup_failure(error: Exception) -> EngineDied:
    if isinstance(error, UserError):
        return EngineDied(reason=str(error), user_error=type(error).__name__)
    return EngineDied(reason=f"{type(error).__name__}: {error}")


def _exit_with_parent(folder: str) -> None:
    """Blocks until stdin ends, then ends the process at once: nobody is left to read an answer."""
    while os.read(0, 4096):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def main() -> None:
    """Entry point of the child process."""
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=CoreStart)
    logging.basicConfig(level=start.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    threading.Thread(target=_exit_with_parent, args=(start.folder,), daemon=True, name="parent-watch").start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front end decides what Ctrl-C means
    process = CoreProcess(start)
    signal.signal(signal.SIGTERM, lambda *_: process.begin_shutdown(SIGTERM_DRAIN_SECONDS))
    status = process.run(resolve(EngineConfig, start.config).config)
    zmq.Context.instance().destroy(linger=LINGER_MS)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # no teardown of torch: it can take a second, and everything is sent
