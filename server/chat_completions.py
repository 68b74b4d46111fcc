"""/v1/chat/completions: the shapes of its answer, whole and streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from treadle.runtime.outputs import CompletionOutput
from treadle.runtime.renderer import Prompt
from treadle.server.logprobs import chat_logprobs, prompt_logprobs
from treadle.server.prompts import chat_prompt
from treadle.server.responses import event
from treadle.server.schemas import ChatBody
from treadle.server.serving import Work, serve
from treadle.server.state import ServerState


async def create_chat_completion(request: Request, state: ServerState) -> Response:
    """Answers one chat request."""
    return await serve(request, state, ChatBody, "chatcmpl", _prepare, _whole, _events)


async def _prepare(body: ChatBody, state: ServerState) -> list[Prompt]:
    return [await chat_prompt(body, state)]


async def _whole(work: Work[ChatBody]) -> dict[str, Any]:
    (completions,) = await work.generation.collect()
    choices = [
        {
            "index": completion.index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": _logprobs(work, completion),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        for completion in completions
    ]
    found: dict[str, Any] = {**work.base, "object": "chat.completion", "choices": choices, "usage": work.usage()}
    rows = work.generation.prompt_logprobs[0]
    if work.body.prompt_logprobs is not None and rows is not None:
        found["prompt_logprobs"] = prompt_logprobs(rows, work.state.renderer.token_text)
    return found


async def _events(work: Work[ChatBody]) -> AsyncGenerator[bytes, None]:
    base = {**work.base, "object": "chat.completion.chunk"}
    started: set[int] = set()
    async with aclosing(work.generation.outputs()) as outputs:
        async for _, output in outputs:
            for completion in output.outputs:
                if completion.index not in started:
                    started.add(completion.index)
                    opening = _choice(completion.index, {"role": "assistant", "content": ""})
                    yield event({**base, "choices": [opening], **work.chunk_usage()})
                if completion.text or completion.finish_reason or (completion.logprobs and work.body.logprobs):
                    yield event({**base, "choices": [_delta(work, completion)], **work.chunk_usage()})
    if work.body.include_usage:
        yield event({**base, "choices": [], "usage": work.usage()})


def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _delta(work: Work[ChatBody], completion: CompletionOutput) -> dict[str, Any]:
    choice = _choice(completion.index, {"content": completion.text} if completion.text else {})
    choice |= {"logprobs": _logprobs(work, completion), "finish_reason": completion.finish_reason}
    return choice | ({"stop_reason": completion.stop_reason} if completion.finish_reason else {})


def _logprobs(work: Work[ChatBody], completion: CompletionOutput) -> dict[str, Any] | None:
    if not work.body.logprobs or completion.logprobs is None:
        return None
    texts = work.state.renderer.token_text
    return chat_logprobs(completion.token_ids, completion.logprobs, work.body.top_logprobs or 0, texts)
