"""Mistral: `[TOOL_CALLS]` before a list of calls, or since version 11 before each `name[ARGS]{...}`."""

from __future__ import annotations

import secrets
import string

from treadle.runtime.chat.json_calls import read_calls, stream_value
from treadle.runtime.chat.reader import CallStart, Content, Pieces, Text, Tools, until
from treadle.runtime.chat.tool_formats import ToolFormat

BEGIN, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_LONGEST_NAME = 256


def parse(text: Text, tools: Tools) -> Pieces[None]:
    while (yield from until(text, BEGIN)):
        if not (yield from read_calls(text)) and not (yield from _named_call(text)):
            yield Content(BEGIN)


def _named_call(text: Text) -> Pieces[bool]:
    """`name[CALL_ID]id[ARGS]{...}`, the id with its mark and the mark of the arguments left out or not."""
    while (place := text.rest.find("{")) < 0 and BEGIN not in text.rest:
        if text.ended or len(text.rest) > _LONGEST_NAME:
            return False
        yield None
    name = text.rest[: max(place, 0)].partition(ARGS)[0].partition(ID)[0].strip()
    if not name or len(name.split()) > 1:
        return False
    text.take(place)
    yield CallStart(name)
    yield from stream_value(text)
    return True


def call_id() -> str:
    """Nine letters and digits: what the model's template accepts."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


FORMAT = ToolFormat(parse=parse, marks=(BEGIN, ID, ARGS), call_id=call_id)
