"""The HTTP application: its routes, and errors in OpenAI's shape whatever goes wrong."""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import treadle
from treadle.ir.errors import TreadleError
from treadle.server.body import read_body
from treadle.server.chat_completions import create_chat_completion
from treadle.server.completions import create_completion
from treadle.server.config import ServerConfig
from treadle.server.errors import ApiError, bad_request
from treadle.server.middleware import Gatekeeper
from treadle.server.prompts import checked_ids, encoded, generation_prompt_options, rendered_chat
from treadle.server.responses import JsonResponse, error_response
from treadle.server.responses_api import create_response, page_of_items, stored_response
from treadle.server.schemas import DetokenizeBody, TokenizeBody
from treadle.server.state import ServerState


def create_app(engine: Any, config: ServerConfig) -> FastAPI:
    """Returns the application over a started engine; its `state.server` is the ServerState."""
    state = ServerState(engine, config)
    app = FastAPI(title="treadle", version=treadle.__version__, docs_url=None, redoc_url=None)
    app.state.server = state
    app.add_middleware(Gatekeeper, state=state)
    for kind in (ApiError, TreadleError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, _on_error)
    _add_openai_routes(app, state)
    _add_token_routes(app, state)
    _add_operator_routes(app, state)
    return app


def _add_openai_routes(app: FastAPI, state: ServerState) -> None:
    started = int(time.time())

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await create_completion(request, state)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await create_chat_completion(request, state)

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        return await create_response(request, state)

    @app.get("/v1/responses/{response_id}")
    async def response(response_id: str) -> Response:
        return JsonResponse(stored_response(response_id, state).response)

    @app.get("/v1/responses/{response_id}/input_items")
    async def input_items(response_id: str) -> Response:
        return JsonResponse(page_of_items(stored_response(response_id, state).input_items))

    @app.delete("/v1/responses/{response_id}")
    async def forget(response_id: str) -> Response:
        state.responses.remove(stored_response(response_id, state).response["id"])
        return JsonResponse({"id": response_id, "object": "response", "deleted": True})

    @app.get("/v1/models")
    async def models() -> Response:
        return JsonResponse({"object": "list", "data": [_card(state, name, started) for name in state.model_names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return JsonResponse(_card(state, state.check_model(name), started))


def _add_token_routes(app: FastAPI, state: ServerState) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await read_body(request, TokenizeBody, state.config)
        state.check_model(body.model)
        ids = await _tokenized(body, state)
        found: dict[str, Any] = {"count": len(ids), "max_model_len": state.max_model_len, "tokens": ids}
        if body.return_token_strs:
            found["token_strs"] = [state.renderer.tokenizer.id_to_token(i) for i in ids]
        return JsonResponse(found)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await read_body(request, DetokenizeBody, state.config)
        state.check_model(body.model)
        ids = checked_ids(body.tokens, "tokens", state.vocab_size, "tokens")
        return JsonResponse({"prompt": state.renderer.decode(ids, skip_special_tokens=body.skip_special_tokens)})


def _add_operator_routes(app: FastAPI, state: ServerState) -> None:
    @app.get("/health")
    async def health() -> Response:
        state.check_alive()
        return JsonResponse({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        state.check_alive()
        if state.admission.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        return JsonResponse({"status": "ready"})

    @app.get("/metrics")
    async def metrics() -> Response:
        await state.read_stats()
        return Response(state.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache(reset_running_requests: bool = False) -> Response:
        state.check_alive()
        if not await state.engine.reset_prefix_cache(reset_running_requests):
            message = "blocks are in use by running requests; try again later, or start them over with ?reset_running_requests=true"
            raise ApiError(409, message, code="prefix_cache_in_use")
        return JsonResponse({"status": "ok"})

    @app.get("/version")
    async def version() -> Response:
        return JsonResponse({"version": treadle.__version__})


async def _tokenized(body: TokenizeBody, state: ServerState) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("send either prompt or messages", "prompt")
    if body.prompt is not None:
        return await encoded(body.prompt, "prompt", body.add_special_tokens is not False, state)
    options = {
        "tools": body.tools,
        **generation_prompt_options(body),
        "kwargs": body.chat_template_kwargs,
    }
    return (await rendered_chat(body.messages, options, state)).token_ids


def _card(state: ServerState, name: str, created: int) -> dict[str, Any]:
    card = {"id": name, "object": "model", "created": created, "owned_by": "treadle"}
    return {**card, "root": state.engine.info.name, "max_model_len": state.max_model_len}


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        reason = f"{request.method} {request.url.path}: {error.detail}"
        error = ApiError(error.status_code, reason, headers=dict(error.headers or {}))
    elif isinstance(error, RequestValidationError):
        first = error.errors()[0]
        error = bad_request(f"{first['loc'][-1]}: {first['msg']}", str(first["loc"][-1]))
    return error_response(error)
