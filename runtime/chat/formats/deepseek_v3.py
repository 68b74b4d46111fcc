"""DeepSeek V3, R1 and V3.1: calls between marks of their own, arguments bare or in a fenced block of JSON."""

from __future__ import annotations

from treadle.runtime.chat.json_calls import stream_value
from treadle.runtime.chat.reader import CallStart, Content, Pieces, Text, Tools, starts_with, until
from treadle.runtime.chat.tool_formats import ToolFormat

BEGIN_ALL, END_ALL = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE, FENCE_END = "```json", "```"


def parse(text: Text, tools: Tools) -> Pieces[None]:
    while (yield from until(text, BEGIN_ALL)):
        unread = BEGIN_ALL
        while (yield from starts_with(text, BEGIN)):
            if not (yield from _call(text)):
                unread += BEGIN
                break
            unread = ""
        if unread:
            yield Content(unread)
        else:
            yield from starts_with(text, END_ALL)


def _call(text: Text) -> Pieces[bool]:
    """`function<sep>name`, fenced arguments; or `name<sep>` and bare ones."""
    while (place := text.rest.find("{")) < 0:
        if text.ended or END in text.rest:
            return False
        yield None
    kind, separator, name = text.rest[:place].partition(SEPARATOR)
    name = name.partition(FENCE)[0].strip() or kind.strip()
    if not separator or not name or len(name.split()) > 1:
        return False
    text.take(place)
    yield CallStart(name)
    yield from stream_value(text)
    yield from starts_with(text, FENCE_END)
    yield from starts_with(text, END)
    return True


FORMAT = ToolFormat(parse=parse, marks=(BEGIN_ALL, END_ALL, BEGIN, SEPARATOR, END))
