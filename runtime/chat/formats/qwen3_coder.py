"""Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from treadle.runtime.chat.reader import Arguments, CallStart, Content, Pieces, Text, Tools, starts_with, until
from treadle.runtime.chat.tool_formats import ToolFormat

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_LONGEST_NAME = 256


def parse(text: Text, tools: Tools) -> Pieces[None]:
    """A value is text unless the tool's schema gives it another type; each comes out when it is complete."""
    while mark := (yield from until(text, BEGIN, FUNCTION)):
        if mark == BEGIN and not (yield from starts_with(text, FUNCTION)):
            yield Content(BEGIN)
            continue
        name = yield from _name(text)
        if name is None:
            yield Content(FUNCTION if mark == FUNCTION else BEGIN + FUNCTION)
            continue
        yield CallStart(name)
        yield from _arguments(text, tools.get(name, {}))
        yield from starts_with(text, FUNCTION_END)
        yield from starts_with(text, END)


def _name(text: Text) -> Pieces[str | None]:
    """What stands before `>`, which is taken with it; None if no name does."""
    while (place := text.rest.find(">")) < 0:
        if text.ended or len(text.rest) > _LONGEST_NAME:
            return None
        yield None
    name = text.rest[:place].strip()
    if not name or len(name.split()) > 1:
        return None
    text.take(place + 1)
    return name


def _arguments(text: Text, schema: Mapping[str, Any]) -> Pieces[None]:
    opening = "{"
    properties = schema.get("properties")
    while (yield from starts_with(text, PARAMETER)):
        name = yield from _name(text)
        if name is None:
            break
        while PARAMETER_END not in text.rest and not text.ended:
            yield None
        value, _, text.rest = text.rest.partition(PARAMETER_END)
        kind = properties.get(name) if isinstance(properties, Mapping) else None
        yield Arguments(f"{opening}{json.dumps(name, ensure_ascii=False)}: {_as_json(value, kind)}")
        opening = ", "
    yield Arguments("{}" if opening == "{" else "}")


def _as_json(value: str, schema: Any) -> str:
    """The value as JSON: read as JSON where the schema allows more than text and it is, else as text."""
    value = value.removeprefix("\n").removesuffix("\n")
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    kinds = [kinds] if isinstance(kinds, str) else kinds
    combined = isinstance(schema, Mapping) and any(key in schema for key in ("anyOf", "oneOf", "$ref", "enum", "const"))
    if "string" not in (kinds or ["string"]) or (combined and not kinds):
        try:
            return json.dumps(json.loads(value), ensure_ascii=False)
        except (ValueError, RecursionError):
            pass
    return json.dumps(value, ensure_ascii=False)


FORMAT = ToolFormat(parse=parse, marks=(BEGIN, END))
