"""/v1/chat/completions: the shapes of its answer, whole and streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from treadle.runtime.outputs import CompletionOutput
from treadle.runtime.renderer import Prompt
from treadle.server.answers import Answer, answer_of
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
    choices = [_message(work, completion) for completion in completions]
    found: dict[str, Any] = {**work.base, "object": "chat.completion", "choices": choices, "usage": work.usage()}
    rows = work.generation.prompt_logprobs[0]
    if work.body.prompt_logprobs is not None and rows is not None:
        found["prompt_logprobs"] = prompt_logprobs(rows, work.state.renderer.token_text)
    return found


def _message(work: Work[ChatBody], completion: CompletionOutput) -> dict[str, Any]:
    answer = answer_of(work.body, work.prompts[0], work.state)
    message = {"role": "assistant", "refusal": None, **answer.message(completion.text)}
    return {
        "index": completion.index,
        "message": message,
        "logprobs": _logprobs(work, completion),
        "finish_reason": answer.finish_reason(completion.finish_reason),
        "stop_reason": completion.stop_reason,
    }


async def _events(work: Work[ChatBody]) -> AsyncGenerator[bytes, None]:
    base = {**work.base, "object": "chat.completion.chunk"}
    answers: dict[int, Answer] = {}
    async with aclosing(work.generation.outputs()) as outputs:
        async for _, output in outputs:
            for completion in output.outputs:
                if completion.index not in answers:
                    answers[completion.index] = answer_of(work.body, work.prompts[0], work.state)
                    opening = _choice(completion.index, {"role": "assistant", "content": ""})
                    yield event({**base, "choices": [opening], **work.chunk_usage()})
                choice = _delta(work, completion, answers[completion.index])
                if choice["delta"] or choice["finish_reason"] or choice["logprobs"]:
                    yield event({**base, "choices": [choice], **work.chunk_usage()})
    if work.body.include_usage:
        yield event({**base, "choices": [], "usage": work.usage()})


def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _delta(work: Work[ChatBody], completion: CompletionOutput, answer: Answer) -> dict[str, Any]:
    ended = completion.finish_reason is not None
    choice = _choice(completion.index, answer.delta(completion.text, ended=ended))
    choice |= {"logprobs": _logprobs(work, completion), "finish_reason": answer.finish_reason(completion.finish_reason)}
    return choice | ({"stop_reason": completion.stop_reason} if completion.finish_reason else {})


def _logprobs(work: Work[ChatBody], completion: CompletionOutput) -> dict[str, Any] | None:
    if not work.body.logprobs or completion.logprobs is None:
        return None
    texts = work.state.renderer.token_text
    return chat_logprobs(completion.token_ids, completion.logprobs, work.body.top_logprobs or 0, texts)
