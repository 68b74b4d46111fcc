"""The front end of a server: many concurrent requests over one engine core in its own process. Imports no torch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress

import msgspec

from treadle.codegen.bundle import open_bundle
from treadle.ir.errors import EngineDeadError
from treadle.runtime.config import EngineConfig
from treadle.runtime.engine.core_client import ProcessClient
from treadle.runtime.engine.input_processor import InputProcessor, ProcessedRequest, PromptInput
from treadle.runtime.engine.model_info import ModelInfo
from treadle.runtime.engine.output_processor import OutputProcessor
from treadle.runtime.engine.renderer_of import renderer_of
from treadle.runtime.outputs import RequestOutput
from treadle.runtime.protocol import CoreOutput, SchedulerStats
from treadle.runtime.renderer import Renderer
from treadle.runtime.sampling_params import RequestOutputKind, SamplingParams

logger = logging.getLogger(__name__)

OUTPUTS_AT_ONCE = 64
"""Outputs that are processed before other tasks of the loop get a turn."""


class OutputQueue:
    """What one reader has not read yet: at most one output, into which later ones are merged."""

    def __init__(self, delta: bool):
        self._delta = delta
        self._pending: RequestOutput | None = None
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Adds an output; a slow reader gets it together with those before."""
        if self._pending is None:
            self._pending = output
        else:
            self._pending.add(output, aggregate=self._delta)
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """Ends the reader with an error, after what is pending."""
        self._error = error
        self._changed.set()

    async def get(self) -> RequestOutput:
        """The next output. Raises what `fail` was given."""
        while self._pending is None:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        output, self._pending = self._pending, None
        return output


def _renderer_of_config(config: EngineConfig) -> Renderer | None:
    return renderer_of(open_bundle(config.bundle, verify_key=config.verify_key, for_loading=False))


class AsyncEngine:
    """Start it with `wait_ready`; use it from one event loop. `load_renderer` replaces the bundle's renderer."""

    def __init__(
        self, config: EngineConfig, *, load_renderer: Callable[[EngineConfig], Renderer | None] = _renderer_of_config
    ):
        self.config = config
        self.renderer: Renderer | None = None
        self._load_renderer = load_renderer
        self._client = ProcessClient(config, self._take_outputs, self._core_died)
        self._starting: asyncio.Task[None] | None = None
        self._info: ModelInfo | None = None
        self._queues: dict[str, OutputQueue] = {}
        self._shut_down = False

    # Life

    async def wait_ready(self) -> ModelInfo:
        """Starts the core if needed and returns once requests are served. Raises why it could not start."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)
        return self.info

    async def _start(self) -> None:
        core = asyncio.create_task(self._client.start())
        try:
            self.renderer = await asyncio.to_thread(self._load_renderer, self.config)
            if self.renderer is not None:
                await asyncio.to_thread(self.renderer.warm_up)  # the core takes longer
            info = await core
        except BaseException:
            core.cancel()
            await asyncio.gather(core, return_exceptions=True)
            self._client.close()
            raise
        if self.renderer is not None:
            self.renderer.max_model_len = info.max_model_len
        self._inputs = InputProcessor(info, self.renderer, generation_config=self.config.generation_config)
        self._outputs = OutputProcessor(self.renderer)
        self._info = info

    @property
    def info(self) -> ModelInfo:
        """The served model; known once ready."""
        assert self._info is not None, "the engine is not ready: await wait_ready() first"
        return self._info

    @property
    def is_alive(self) -> bool:
        """Whether requests can still be served."""
        return self.dead_reason is None

    @property
    def dead_reason(self) -> str | None:
        """Why the engine is dead, or None."""
        return "the engine was shut down" if self._shut_down else self._client.dead_reason

    @property
    def core_pid(self) -> int | None:
        """Process id of the engine core."""
        return self._client.pid

    def default_params(self) -> SamplingParams:
        """What a request without parameters gets."""
        return self._inputs.default_params()

    def _check_alive(self) -> None:
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)

    # Requests

    async def generate(
        self,
        prompt: PromptInput,
        params: SamplingParams | None,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields outputs of the request until it has finished; leaving the iteration aborts it.

        Raises UserError for a request that cannot be served, EngineDeadError if the engine is or becomes dead.
        """
        self._check_alive()
        await self.wait_ready()
        request = await self._process(prompt, params, request_id, priority, cache_salt)
        self._check_alive()
        self._outputs.add(request)
        queue = self._queues[request_id] = OutputQueue(request.params.output_kind is RequestOutputKind.DELTA)
        try:
            for child in request.children:
                self._client.add_request(child)
            while True:
                output = await queue.get()
                yield output
                if output.finished:
                    return
        finally:
            self._forget(request_id, queue)

    async def _process(
        self, prompt: PromptInput, params: SamplingParams | None, request_id: str, priority: int, salt: str | None
    ) -> ProcessedRequest:
        def work() -> ProcessedRequest:
            return self._inputs.process(prompt, params, request_id, priority=priority, cache_salt=salt)

        return await asyncio.to_thread(work) if self._inputs.is_long(prompt) else work()

    def _forget(self, request_id: str, queue: OutputQueue) -> None:
        """Ends what still runs of a request whose reader is gone. An abort may have done it, and the id be reused."""
        if self._queues.get(request_id) is not queue:
            return
        del self._queues[request_id]
        self._abort_core(self._outputs.drop(request_id))

    async def abort(self, request_id: str) -> None:
        """Ends a request; its reader gets a last output with finish reason "abort". Unknown ids are ignored."""
        if self._info is None:
            return
        last, running = self._outputs.abort(request_id)
        self._abort_core(running)
        queue = self._queues.pop(request_id, None)
        if queue is not None and last is not None:
            queue.put(last)

    def _abort_core(self, core_ids: list[str]) -> None:
        if core_ids:
            with suppress(EngineDeadError):  # a dead core runs nothing
                self._client.abort(core_ids)

    async def _take_outputs(self, outputs: list[CoreOutput]) -> None:
        for start in range(0, len(outputs), OUTPUTS_AT_ONCE):
            if start:
                await asyncio.sleep(0)
            done = self._outputs.process(outputs[start : start + OUTPUTS_AT_ONCE])
            self._abort_core(done.to_abort)
            for output in done.outputs:
                if queue := self._queues.get(output.request_id):
                    queue.put(output)
            for request_id, error in done.errors.items():
                if queue := self._queues.get(request_id):
                    queue.fail(error)

    def _core_died(self, reason: str) -> None:
        logger.error("the engine core died: %s", reason)
        for queue in self._queues.values():
            queue.fail(EngineDeadError(reason))

    # Operations

    async def stats(self) -> SchedulerStats:
        """Gauges of this moment and totals since the start."""
        return msgspec.convert(await self._client.call("stats"), SchedulerStats)

    async def reset_prefix_cache(self, force: bool = False) -> bool:
        """Forgets all cached prefixes. Returns False, and does nothing, while blocks are in use and not `force`."""
        return bool(await self._client.call("reset_prefix_cache", force))

    async def pause(self) -> None:
        """Admits no request from now on; running ones go on."""
        await self._client.call("pause")

    async def resume(self) -> None:
        """Ends a pause."""
        await self._client.call("resume")

    async def check_integrity(self) -> None:
        """Has the core assert that nothing is lost."""
        await self._client.call("check_integrity")

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        """Takes no new request, gives running ones `drain_timeout` seconds, then ends the core. May be called twice."""
        if self._shut_down:
            return
        self._shut_down = True
        await self._client.shutdown(drain_timeout)
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        for queue in self._queues.values():
            queue.fail(EngineDeadError("the engine was shut down"))
