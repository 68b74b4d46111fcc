"""Llama 3.1 and later: the whole answer is `{"name": ..., "parameters": {...}}`, after `<|python_tag|>` or without it."""

from __future__ import annotations

from treadle.runtime.chat.json_calls import read_calls
from treadle.runtime.chat.reader import Content, Pieces, Text, Tools, everything, until
from treadle.runtime.chat.tool_formats import ToolFormat

TAG = "<|python_tag|>"


def parse(text: Text, tools: Tools) -> Pieces[None]:
    """Without the tag only an object that names one of `tools` is a call: a JSON answer is not."""
    if (yield from read_calls(text, tools, separators=";,")):
        yield from everything(text)
        return
    while (yield from until(text, TAG)):
        if not (yield from read_calls(text, separators=";,")):
            yield Content(TAG)


FORMAT = ToolFormat(parse=parse, marks=(TAG,), tag=('{"name": "{name}", "parameters": ', "}", '{"name": "'))
