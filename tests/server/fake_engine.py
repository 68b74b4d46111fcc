"""A stand-in for AsyncEngine: scripted tokens, real tokenizer, delays, a limit on running sequences, a crash switch.

Follows the contract of `runtime.engine.async_engine.AsyncEngine`, with the output types of `runtime.outputs`.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from treadle.ir.errors import EngineDeadError
from treadle.runtime.outputs import CompletionOutput, Logprob, RequestOutput
from treadle.runtime.protocol import SchedulerStats
from treadle.runtime.renderer import Renderer
from treadle.runtime.sampling_params import RequestOutputKind, SamplingParams

EOS = 2


@dataclass(frozen=True)
class FakeInfo:
    name: str = "fake"
    max_model_len: int = 256
    vocab_size: int = 400
    dtype: str = "f32"


class FakeEngine:
    """Answers a prompt with a text that depends on the prompt, the seed and the completion's index.

    `script` fixes the ids of every answer instead; an answer ends at EOS unless `ignore_eos`.
    """

    def __init__(
        self,
        renderer: Renderer,
        *,
        script: list[int] | None = None,
        delay: float = 0.0,
        slots: int = 64,
        lowest: float = -5.0,
        info: FakeInfo | None = None,
    ):
        self.info = info or FakeInfo()
        self.renderer = renderer
        renderer.max_model_len = self.info.max_model_len
        self.script, self.delay, self.lowest = script, delay, lowest
        self.dead_reason: str | None = None
        self.seen: list[tuple[list[int], SamplingParams]] = []
        self.aborted: set[str] = set()
        self.running: dict[str, int] = {}
        self.totals = {"prompt_tokens": 0, "generation_tokens": 0, "num_aborted": 0, "num_steps": 0}
        self.most_running = 0
        self.num_resets = 0
        self._slots = asyncio.Semaphore(slots)
        self._waiting = 0
        self.shut_down = False

    @property
    def is_alive(self) -> bool:
        return self.dead_reason is None

    def crash(self, reason: str = "killed by signal 9") -> None:
        self.dead_reason = reason
        self.running.clear()

    async def wait_ready(self) -> None:
        return None

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, priority: int = 0, cache_salt: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        self._check_alive()
        assert request_id not in self.running, "the engine was given one id twice"
        ids = prompt["prompt_token_ids"]
        self.seen.append((ids, params))
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        self.running[request_id] = params.n
        self.most_running = max(self.most_running, len(self.running))
        async for output in self._steps(ids, params, request_id):
            yield output
        self._end(request_id)

    async def _steps(
        self, ids: list[int], params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        self.totals["prompt_tokens"] += len(ids)
        answers = [self._answer(ids, params, index) for index in range(params.n)]
        completions = [CompletionOutput(index, "", []) for index in range(params.n)]
        prompt_rows: Any = None
        if params.prompt_logprobs is not None:
            prompt_rows = [None, *(self._row(i, params.prompt_logprobs) for i in ids[1:])]
        sent = [""] * params.n
        first = True
        for step in range(max(len(answer) for answer, _ in answers)):
            await asyncio.sleep(self.delay)
            self._check_alive()
            if request_id in self.aborted:
                return
            self.totals["num_steps"] += 1
            moved = []
            for completion, (answer, reason) in zip(completions, answers, strict=True):
                if step < len(answer):
                    moved.append(self._advance(completion, answer, reason, step, params, sent))
            finished = all(completion.finished() for completion in completions)
            delta = params.output_kind is RequestOutputKind.DELTA
            if delta or finished:
                shown = moved if delta else completions
                rows, first = (prompt_rows if first else None), False
                yield RequestOutput(request_id, None, ids, rows, shown, finished, None, min(16, len(ids) - 1))

    def _advance(
        self, whole: CompletionOutput, answer: list[int], reason: str, step: int, params: SamplingParams, sent: list[str]
    ) -> CompletionOutput:
        token = answer[step]
        whole.token_ids = [*whole.token_ids, token]
        self.totals["generation_tokens"] += 1
        ended = step == len(answer) - 1
        text = self.renderer.decode(whole.token_ids, skip_special_tokens=True)
        whole.text = text if ended else text.rstrip("\ufffd")
        if params.logprobs is not None:
            whole.logprobs = [*(whole.logprobs or []), self._row(token, params.logprobs)]
        whole.finish_reason = reason if ended else None
        new, sent[whole.index] = whole.text[len(sent[whole.index]) :], whole.text
        logprobs = whole.logprobs[-1:] if whole.logprobs else None
        return CompletionOutput(whole.index, new, [token], None, logprobs, whole.finish_reason)

    def _answer(self, ids: list[int], params: SamplingParams, index: int) -> tuple[list[int], str]:
        limit = params.max_tokens or 1
        if self.script is not None:
            script = self.script
        else:
            salt = zlib.crc32(repr((ids, params.seed, index if params.seed is not None else 0)).encode())
            script = [*self.renderer.encode(f" answer {salt % 9973} of the quick brown fox"), EOS]
        if params.ignore_eos:
            script = (script * (limit // len(script) + 1))[:limit]
        reason = "stop" if len(script) <= limit and not params.ignore_eos else "length"
        return script[:limit], reason

    def _row(self, token: int, top: int) -> dict[int, Logprob]:
        row = {token: Logprob(-0.5, 1, None)}
        for rank in range(2, top + 1):
            row[(token + rank) % self.info.vocab_size] = Logprob(self.lowest * rank, rank, None)
        return row

    async def abort(self, request_id: str) -> None:
        """The only way by which a request that nobody reads any more leaves `running`."""
        if request_id in self.running:
            self.totals["num_aborted"] += self.running[request_id]
            self.aborted.add(request_id)
            self._end(request_id)

    def _end(self, request_id: str) -> None:
        if self.running.pop(request_id, None) is not None:
            self._slots.release()

    async def stats(self) -> SchedulerStats:
        self._check_alive()
        usage = len(self.running) / 100
        return SchedulerStats(
            num_running=len(self.running), num_waiting=self._waiting, num_blocks=100, kv_usage=usage, **self.totals
        )

    async def reset_prefix_cache(self, force: bool = False) -> bool:
        self._check_alive()
        done = force or not self.running
        self.num_resets += done
        return done

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        self.shut_down = True

    def _check_alive(self) -> None:
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)
