"""Runs the prompts of one HTTP request on the engine: merges their outputs, aborts what nobody waits for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

from treadle.ir.errors import EngineDeadError, UserError
from treadle.runtime.outputs import ABORT, ERROR, CompletionOutput, RequestOutput
from treadle.runtime.sampling_params import SamplingParams
from treadle.server.errors import ApiError
from treadle.server.schemas import SamplingBody
from treadle.server.state import ServerState
from treadle.server.structured import constraint_error

_PENDING_OUTPUTS = 16
"""Outputs of several prompts that may wait for a slow reader; the engine merges what comes beyond."""


@dataclass(frozen=True)
class Job:
    """One prompt of a request: what is sent to the engine under `request_id`, and its text if there is one."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    text: str | None = None


@dataclass
class Usage:
    """Tokens of one request: over all its prompts and, for the answer, over n."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached: dict[int, int] = field(default_factory=dict)

    def count(self, index: int, output: RequestOutput) -> None:
        """Takes in an output of prompt `index`."""
        self.completion_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        self.cached[index] = output.num_cached_tokens or self.cached.get(index, 0)

    def as_json(self) -> dict[str, Any]:
        """Returns the usage in OpenAI's shape."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }


class Generation:
    """The work of one HTTP request. Iterating it gives (prompt index, output) until all prompts have ended."""

    def __init__(self, state: ServerState, jobs: list[Job], body: SamplingBody):
        self.jobs = jobs
        self.usage = Usage(prompt_tokens=sum(len(job.token_ids) for job in jobs))
        self._state = state
        self._engine = state.engine
        self._metrics = state.metrics
        self._body = body
        self._start = time.perf_counter()
        self._last_token: dict[tuple[int, int], float] = {}

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yields outputs as they come. Raises ApiError if the engine ends one without finishing it.

        However this ends, nothing of the request goes on running in the engine.
        """
        source = self._one(0) if len(self.jobs) == 1 else self._merged()
        async with aclosing(source):
            async for index, output in source:
                self._observe(index, output)
                yield index, output
        self._metrics.latency.observe(time.perf_counter() - self._start)

    async def collect(self) -> list[list[CompletionOutput]]:
        """Returns the finished completions of each prompt, in order."""
        found: list[dict[int, CompletionOutput]] = [{} for _ in self.jobs]
        self.prompt_logprobs: list[Any] = [None] * len(self.jobs)
        async with aclosing(self.outputs()) as outputs:
            async for index, output in outputs:
                found[index] |= {completion.index: completion for completion in output.outputs}
                self.prompt_logprobs[index] = output.prompt_logprobs or self.prompt_logprobs[index]
        return [[completions[i] for i in sorted(completions)] for completions in found]

    async def _one(self, index: int) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        job, ended = self.jobs[index], False
        prompt = {"prompt_token_ids": job.token_ids}
        stream = self._engine.generate(
            prompt, job.params, job.request_id, priority=self._body.priority, cache_salt=self._body.cache_salt
        )
        self._state.running.add(job.request_id)
        try:
            async for output in stream:
                ended = output.finished
                yield index, output
            if not ended:
                raise _ended_early(ABORT)
        except UserError as error:
            raise constraint_error(error, self._body) from error
        finally:
            self._state.running.discard(job.request_id)
            if not ended:
                with suppress(EngineDeadError):  # a dead engine runs nothing
                    await self._engine.abort(job.request_id)
            await stream.aclose()

    async def _merged(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        queue: asyncio.Queue[tuple[int, RequestOutput] | BaseException | None] = asyncio.Queue(_PENDING_OUTPUTS)

        async def pump(index: int) -> None:
            try:
                async with aclosing(self._one(index)) as outputs:
                    async for item in outputs:
                        await queue.put(item)
                await queue.put(None)
            except Exception as error:  # handed to the reader, who raises it
                await queue.put(error)

        tasks = [asyncio.create_task(pump(index)) for index in range(len(self.jobs))]
        running = len(tasks)
        try:
            while running:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _observe(self, index: int, output: RequestOutput) -> None:
        self.usage.count(index, output)
        now = time.perf_counter()
        for completion in output.outputs:
            if self._body.stream and completion.token_ids:
                self._observe_tokens((index, completion.index), len(completion.token_ids), now)
            if completion.finish_reason in (ABORT, ERROR):
                raise _ended_early(completion.finish_reason)
            if completion.finish_reason is not None:
                self._metrics.finished.labels(completion.finish_reason).inc()
        if output.finished and not self._body.stream and output.metrics and output.metrics.first_token_latency > 0:
            self._metrics.first_token.observe(output.metrics.first_token_latency)

    def _observe_tokens(self, which: tuple[int, int], count: int, now: float) -> None:
        before = self._last_token.get(which)
        self._last_token[which] = now
        if before is None:
            self._metrics.first_token.observe(now - self._start)
        else:
            self._metrics.between_tokens.observe((now - before) / count)


def _ended_early(reason: str) -> ApiError:
    if reason == ABORT:
        return ApiError(503, "the request was aborted before its answer was complete", code="aborted")
    return ApiError(500, "the engine could not finish this request; the server's log has the cause", code="engine_error")
