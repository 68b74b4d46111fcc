"""Reads a request's body within a size and a time, and checks it against a schema. Errors name the field."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import orjson
from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from treadle.server.config import ServerConfig
from treadle.server.errors import ApiError, bad_request
from treadle.server.schemas import Body

B = TypeVar("B", bound=Body)


async def read_body(request: Request, schema: type[B], config: ServerConfig) -> B:
    """Returns the checked body. Raises ApiError: 413 if too large, 408 if too slow, 400 if it is not right."""
    try:
        async with asyncio.timeout(config.body_timeout):
            raw = await _read(request, config.max_body_bytes)
    except TimeoutError as error:
        raise ApiError(408, f"the request's body did not arrive within {config.body_timeout:g} s") from error
    except ClientDisconnect as error:
        raise ApiError(499, "the client closed the connection") from error
    return parse_body(raw, schema)


def parse_body(raw: bytes, schema: type[B]) -> B:
    """Returns the body in `raw`, which is strict JSON: no NaN, no lone surrogates, nesting up to 1024."""
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"the body is not valid JSON: {error}", None, "invalid_json") from error
    if not isinstance(data, dict):
        raise bad_request("the body should be a JSON object", None, "invalid_json")
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        raise validation_error(error) from error


async def _read(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(limit: int) -> ApiError:
    message = f"the request's body is larger than this server's limit of {limit} bytes"
    return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})


def validation_error(error: ValidationError) -> ApiError:
    """The 400 for a body that does not fit its schema; names the field and the place in it."""
    first = error.errors(include_url=False, include_context=False)[0]
    place, *inner = first["loc"] or ("body",)
    where = str(place) + "".join(f"[{part}]" if isinstance(part, int) else "" for part in inner)
    given = type(first.get("input")).__name__
    return bad_request(f"{where}: {first['msg']} (got {given})", str(place), first["type"])
