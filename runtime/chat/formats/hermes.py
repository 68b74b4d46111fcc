"""Hermes, Qwen and many others: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, anywhere in the text."""

from __future__ import annotations

from treadle.runtime.chat.json_calls import read_calls
from treadle.runtime.chat.reader import Content, Pieces, Text, Tools, starts_with, until
from treadle.runtime.chat.tool_formats import ToolFormat

BEGIN, END = "<tool_call>", "</tool_call>"


def parse(text: Text, tools: Tools) -> Pieces[None]:
    while (yield from until(text, BEGIN)):
        if not (yield from read_calls(text)):
            yield Content(BEGIN)
            continue
        while (yield from starts_with(text, "}")):  # small models close one brace too many
            pass
        yield from starts_with(text, END)


FORMAT = ToolFormat(
    parse=parse,
    marks=(BEGIN, END),
    tag=(BEGIN + '\n{"name": "{name}", "arguments": ', "}\n" + END, BEGIN),
)
