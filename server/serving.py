"""What both generating endpoints do around their own part: admit, read, check, run, give up, answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from treadle.runtime.renderer import Prompt
from treadle.server.body import read_body
from treadle.server.generation import Generation, Job
from treadle.server.responses import DONE, EventStream, answer
from treadle.server.sampling import sampling_params
from treadle.server.schemas import SamplingBody
from treadle.server.state import ServerState

B = TypeVar("B", bound=SamplingBody)


class Work(Generic[B]):
    """One accepted request: its body, the name its answer carries, and the generation that runs for it."""

    def __init__(self, state: ServerState, body: B, model: str, prefix: str, prompts: list[Prompt]):
        self.state = state
        self.body = body
        unique = uuid.uuid4().hex
        self.id = f"{prefix}-{body.request_id or unique}"
        self.prompts = prompts
        self.base = {"id": self.id, "created": int(time.time()), "model": model}
        jobs = [
            Job(f"{prefix}-{unique}-{i}", p.token_ids, sampling_params(body, state, len(p.token_ids)), p.text)
            for i, p in enumerate(prompts)
        ]
        self.generation = Generation(state, jobs, body)

    def usage(self) -> dict[str, Any]:
        """The usage so far, in OpenAI's shape."""
        return self.generation.usage.as_json()

    def chunk_usage(self) -> dict[str, Any]:
        """What a chunk says about usage: nothing unless asked, null before the last one, numbers if continuous."""
        if not self.body.include_usage:
            return {}
        return {"usage": self.usage() if self.body.continuous_usage else None}


class Place:
    """The place of one admitted request, held until the last byte is out or the client is gone."""

    def __init__(self, request: Request, state: ServerState, held: ExitStack):
        self._request, self._state, self._held = request, state, held

    async def answer(self, work: Awaitable[dict[str, Any]]) -> Response:
        """The answer in one piece."""
        return await answer(self._request, work, self._state.metrics.aborted.inc)

    def stream(self, events: AsyncGenerator[bytes, None], *, ending: bytes = DONE) -> Response:
        """The answer as events; the place goes with it."""
        return EventStream(
            events,
            ending=ending,
            stall_timeout=self._state.config.stall_timeout,
            on_close=self._held.pop_all().close,
            on_gone=self._state.metrics.aborted.inc,
        )


@contextmanager
def admitted(request: Request, state: ServerState) -> Iterator[Place]:
    """Admits a request. Raises a 503 if the engine is dead, the server full or shutting down."""
    state.check_alive()
    with ExitStack() as held:
        held.enter_context(state.admission.enter())
        yield Place(request, state, held)


async def serve(
    request: Request,
    state: ServerState,
    schema: type[B],
    prefix: str,
    prepare: Callable[[B, ServerState], Awaitable[list[Prompt]]],
    whole: Callable[[Work[B]], Awaitable[dict[str, Any]]],
    events: Callable[[Work[B]], AsyncGenerator[bytes, None]],
) -> Response:
    """Answers one request: `prepare` renders its prompts, `whole` or `events` shape the answer."""
    with admitted(request, state) as place:
        body = await read_body(request, schema, state.config)
        model = state.check_model(body.model)
        body.check()
        work = Work(state, body, model, prefix, await prepare(body, state))
        return place.stream(events(work)) if body.stream else await place.answer(whole(work))
