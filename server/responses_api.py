"""/v1/responses: answers as items, whole or as typed events; earlier answers continue by their id, from memory."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import orjson
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from treadle.runtime.outputs import LENGTH, CompletionOutput
from treadle.server.answers import Answer, answer_of
from treadle.server.body import read_body, validation_error
from treadle.server.errors import ApiError, as_api_error, bad_request
from treadle.server.prompts import chat_prompt
from treadle.server.response_input import ResponsesBody, input_messages
from treadle.server.response_items import COMPLETED, IN_PROGRESS, INCOMPLETE, OutputItems, random_id
from treadle.server.response_store import StoredResponse
from treadle.server.schemas import ChatBody
from treadle.server.serving import Work, admitted
from treadle.server.state import ServerState

_NAMES = {"messages": "input", "response_format": "text", "max_completion_tokens": "max_output_tokens"}
"""Field of a chat -> the field of this endpoint it comes from."""


async def create_response(request: Request, state: ServerState) -> Response:
    """Answers one request."""
    with admitted(request, state) as place:
        body = await read_body(request, ResponsesBody, state.config)
        model = state.check_model(body.model)
        body.check()
        with _own_names():
            chat, conversation = _chat(body, state)
            chat.check()
            work = Work(state, chat, model, "resp", [await chat_prompt(chat, state)])
        answer = _Response(body, work, conversation)
        return place.stream(answer.events(), ending=b"") if body.stream else await place.answer(answer.whole())


@contextmanager
def _own_names() -> Iterator[None]:
    """Errors about the chat that a request becomes name the field that the request itself has."""
    try:
        yield
    except ApiError as error:
        error.param = _NAMES.get(error.param or "", error.param)
        raise


def stored_response(response_id: str, state: ServerState) -> StoredResponse:
    """The answer of that id. Raises a 404."""
    stored = state.responses.get(response_id)
    if stored is None:
        raise ApiError(404, f"there is no response {response_id[:64]!r} here, or not any more", param="response_id", code="not_found")
    return stored


def _chat(body: ResponsesBody, state: ServerState) -> tuple[ChatBody, list[dict[str, Any]]]:
    history: list[dict[str, Any]] = []
    if body.previous_response_id is not None:
        previous = state.responses.get(body.previous_response_id)
        if previous is None:
            what = f"there is no response {body.previous_response_id[:64]!r} here, or not any more; send the whole conversation"
            raise bad_request(what, "previous_response_id", "previous_response_not_found")
        history = previous.messages
    try:
        return body.as_chat(history)
    except ValidationError as error:
        raise validation_error(error) from error


class _Response:
    """One answer while it is made."""

    def __init__(self, body: ResponsesBody, work: Work[ChatBody], conversation: list[dict[str, Any]]):
        self._body, self._work, self._conversation = body, work, conversation
        self._answer: Answer = answer_of(work.body, work.prompts[0], work.state)
        self._output = OutputItems(self._answer.call_id)
        self._id = random_id("resp")
        self._created = int(time.time())
        self._number = 0

    async def whole(self) -> dict[str, Any]:
        ((completion,),) = await self._work.generation.collect()
        for _ in self._take(completion):
            pass
        return self._ended(completion)

    async def events(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._work.generation.outputs()) as outputs:
            last = None
            try:
                async for _, output in outputs:
                    if last is None:
                        for kind in ("response.created", "response.in_progress"):
                            yield self._event({"type": kind, "response": self._state(IN_PROGRESS)})
                    (last,) = output.outputs
                    for event in self._take(last):
                        yield self._event(event)
            except Exception as error:
                if last is None:
                    raise  # nothing was sent: a plain error with its status
                yield self._event({"type": "response.failed", "response": self._failed(error)})
                return
        if last is not None:
            response = self._ended(last)
            yield self._event({"type": f"response.{response['status']}", "response": response})

    def _take(self, completion: CompletionOutput) -> Iterator[dict[str, Any]]:
        ended = completion.finish_reason is not None
        yield from self._output.add(self._answer.pieces(completion.text, ended=ended))
        if ended:
            yield from self._output.close(_status(completion))

    def _ended(self, completion: CompletionOutput) -> dict[str, Any]:
        status = _status(completion)
        details = {"reason": "max_output_tokens"} if status == INCOMPLETE else None
        response = self._state(status, incomplete_details=details, usage=self._usage())
        if self._body.store is not False:
            messages = [*self._conversation, *input_messages(self._output.items)]
            self._work.state.responses.add(StoredResponse(response, self._body.input_items, messages))
        return response

    def _failed(self, error: Exception) -> dict[str, Any]:
        known = as_api_error(error)
        return self._state("failed", error={"code": known.code or "server_error", "message": known.message})

    def _usage(self) -> dict[str, Any]:
        usage = self._work.usage()
        thoughts = [item["content"][0]["text"] for item in self._output.items if item["type"] == "reasoning"]
        renderer = self._work.state.renderer
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": sum(len(renderer.encode(text)) for text in thoughts)},
            "total_tokens": usage["total_tokens"],
        }

    def _state(self, status: str, **more: Any) -> dict[str, Any]:
        body, chat = self._body, self._work.body
        params = self._work.generation.jobs[0].params
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._work.base["model"],
            "output": [dict(item) for item in self._output.items],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": chat.reasoning_effort, "summary": None},
            "store": body.store is not False,
            "temperature": params.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice if body.tool_choice is not None else "auto",
            "tools": body.tools or [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
            **more,
        }

    def _event(self, content: dict[str, Any]) -> bytes:
        self._number += 1
        numbered = {**content, "sequence_number": self._number - 1}
        return b"event: " + content["type"].encode() + b"\ndata: " + orjson.dumps(numbered) + b"\n\n"


def _status(completion: CompletionOutput) -> str:
    return INCOMPLETE if completion.finish_reason == LENGTH else COMPLETED


def page_of_items(items: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Input items as a page of a list."""
    data = [{"id": f"item_{index}", "type": "message", **item} for index, item in enumerate(items)]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, "has_more": False, **ends}
