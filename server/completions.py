"""/v1/completions: the shapes of its answer, whole and streamed, with the prompt echoed where asked."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from treadle.runtime.outputs import LENGTH, CompletionOutput
from treadle.server.logprobs import completion_logprobs, prompt_logprobs
from treadle.server.prompts import completion_prompts
from treadle.server.responses import event
from treadle.server.schemas import CompletionBody
from treadle.server.serving import Work, serve
from treadle.server.state import ServerState


async def create_completion(request: Request, state: ServerState) -> Response:
    """Answers one completion request."""
    return await serve(request, state, CompletionBody, "cmpl", completion_prompts, _whole, _events)


async def _whole(work: Work[CompletionBody]) -> dict[str, Any]:
    shape = _Shape(work)
    collected = await work.generation.collect()
    choices = []
    for index, completions in enumerate(collected):
        rows = work.generation.prompt_logprobs[index]
        choices += [shape.choice(index, completion, rows) for completion in completions]
    return {**shape.base, "choices": choices, "usage": shape.usage()}


async def _events(work: Work[CompletionBody]) -> AsyncGenerator[bytes, None]:
    shape = _Shape(work)
    async with aclosing(work.generation.outputs()) as outputs:
        async for index, output in outputs:
            for completion in output.outputs:
                choice = shape.choice(index, completion, output.prompt_logprobs)
                if choice["text"] or choice["finish_reason"] or choice["logprobs"]:
                    yield event({**shape.base, "choices": [choice], **work.chunk_usage()})
    if work.body.include_usage:
        yield event({**shape.base, "choices": [], "usage": shape.usage()})


class _Shape:
    """Shapes the choices of one answer. Remembers where each choice's text stands: the first part carries the echo."""

    def __init__(self, work: Work[CompletionBody]):
        self.base = {**work.base, "object": "text_completion"}
        self._work = work
        self._offsets: dict[int, int] = {}
        self._prompt_rows: dict[int, Any] = {}
        self._only_prompt = bool(work.body.echo) and work.body.max_tokens == 0

    def usage(self) -> dict[str, Any]:
        """The usage; scoring a prompt generates nothing."""
        if self._only_prompt:
            self._work.generation.usage.completion_tokens = 0
        return self._work.usage()

    def choice(self, prompt_index: int, completion: CompletionOutput, prompt_rows: Any) -> dict[str, Any]:
        """Returns one choice, or the next part of one in a stream."""
        body = self._work.body
        index = prompt_index * (body.n or 1) + completion.index
        first = index not in self._offsets
        echo = body.echo and first
        prompt_rows = self._prompt_rows.setdefault(prompt_index, prompt_rows)  # a stream brings them once
        text = "" if self._only_prompt else completion.text
        full = (self._prompt_text(prompt_index) if echo else "") + text
        choice: dict[str, Any] = {
            "index": index,
            "text": full,
            "logprobs": self._logprobs(prompt_index, index, completion, prompt_rows if echo else None),
            "finish_reason": LENGTH if self._only_prompt and completion.finish_reason else completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        self._offsets[index] = self._offsets.get(index, 0) + len(full)
        if body.prompt_logprobs is not None and prompt_rows is not None and first:
            choice["prompt_logprobs"] = prompt_logprobs(prompt_rows, self._work.state.renderer.token_text)
        return choice

    def _logprobs(
        self, prompt_index: int, index: int, completion: CompletionOutput, prompt_rows: Any
    ) -> dict[str, Any] | None:
        if self._work.body.logprobs is None:
            return None
        ids: list[int] = []
        rows: list[Any] = []
        if prompt_rows is not None:
            ids, rows = list(self._work.prompts[prompt_index].token_ids), list(prompt_rows)
        if completion.logprobs is not None and not self._only_prompt:
            ids, rows = [*ids, *completion.token_ids], [*rows, *completion.logprobs]
        if not ids:
            return None
        texts, offset = self._work.state.renderer.token_text, self._offsets.get(index, 0)
        return completion_logprobs(ids, rows, self._work.body.logprobs, texts, offset=offset)

    def _prompt_text(self, index: int) -> str:
        prompt = self._work.prompts[index]
        return prompt.text if prompt.text is not None else self._work.state.renderer.decode(prompt.token_ids)
